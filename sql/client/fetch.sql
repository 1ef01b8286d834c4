-- The messages of a lease.
select id, key, headers::text, payload::text, data, produced_at, attempt, $1::bigint from weir.fetch($1::bigint)
