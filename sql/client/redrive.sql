-- Gives dead messages another life.
select weir.redrive($1::text, $2::text, $3::bigint)
