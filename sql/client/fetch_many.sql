-- The messages of leases.
select id, key, headers::text, payload::text, data, produced_at, attempt, lease_id, coalesce(extract(epoch from timeout), 0)::float8
from weir.fetch_many($1::bigint[])
