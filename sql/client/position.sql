-- The id after which a target begins.
select weir.position((weir.topic_named($1::text)).id, $2::text::jsonb, 'from')
