-- Messages without a group.
select id, key, headers::text, payload::text, data, produced_at, 0, 0::bigint, 0::float8
from weir.read($1::text, $2::bigint, $3::int)
