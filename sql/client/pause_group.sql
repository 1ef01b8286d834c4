-- Pauses a group.
select weir.pause_group($1::text, $2::text)
