-- Removes dead messages.
select weir.purge($1::text, $2::text, $3::bigint)
