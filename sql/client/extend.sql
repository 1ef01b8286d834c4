-- Renews leases; those that are still held.
select id from weir.extend_many($1::bigint[], $2::text, make_interval(secs => $3::float8), true) as e (id)
