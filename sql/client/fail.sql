-- One message of a lease was not handled.
select weir.fail($1::bigint, $2::text, $3::bigint, $4::text, make_interval(secs => $5::float8), $6::text)
