-- Changes options of a topic.
select weir.alter_topic($1::text, $2::text::jsonb)
