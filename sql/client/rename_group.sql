-- Renames a group.
select weir.rename_group($1::text, $2::text, $3::text)
