-- weir.fetch_deliveries(lease_ids): the messages of many leases that are deliveries, each with its lease. Leases that are not
-- held any more give no row.
create or replace function weir.fetch_deliveries(lease_ids bigint[])
returns table (lease_id bigint, id bigint, key text, headers jsonb, payload json, data bytea, produced_at timestamptz, attempt int)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
begin
    return query
    select d.lease_id, d.message_id, d.key, d.headers, d.payload, d.data, d.produced_at, d.attempt
    from weir.delivery as d
    where d.lease_id = any (lease_ids)
    order by d.lease_id;
end
$$;
