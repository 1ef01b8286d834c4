-- Drops a group.
select weir.drop_group($1::text, $2::text, $3::boolean)
