-- Creates a group.
select weir.create_group($1::text, $2::text, $3::text::jsonb)
