-- The messages of leases that are deliveries.
select id, key, headers::text, payload::text, data, produced_at, attempt, lease_id from weir.fetch_deliveries($1::bigint[])
