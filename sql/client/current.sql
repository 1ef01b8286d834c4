-- The latest message of a key.
select id, $2::text, headers::text, payload::text, data, produced_at, 0, 0::bigint, 0::float8
from weir.current($1::text, $2::text)
