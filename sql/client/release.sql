-- Gives a lease back.
select weir.release($1::bigint, $2::text, $3::bigint[])
