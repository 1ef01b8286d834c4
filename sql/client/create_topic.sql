-- Creates a topic.
select weir.create_topic($1::text, $2::text::jsonb)
