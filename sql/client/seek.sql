-- Moves a group.
select weir.seek($1::text, $2::text, $3::text::jsonb)
