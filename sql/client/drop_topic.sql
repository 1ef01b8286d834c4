-- Drops a topic.
select weir.drop_topic($1::text, $2::boolean)
