-- One turn of a consumer.
select state, lease_id, low, high, attempt
from weir.poll($1::text, $2::text, $3::text, $4::int, make_interval(secs => $5::float8), $6::bigint, $7::bigint[], true)
