-- Changes options of a group.
select weir.alter_group($1::text, $2::text, $3::text::jsonb)
