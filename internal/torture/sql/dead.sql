-- All dead letters of a topic.
select d.grp, d.message_id, d.payload ->> 'v', coalesce(d.errors -> -1 ->> 'error', '') from weir.dead_letters as d where d.topic = $1
