-- The messages of a lease.
select id, key, headers::text, payload::text, data, produced_at, attempt, $1::bigint,
    coalesce(extract(epoch from timeout), 0)::float8
from weir.fetch($1::bigint)
