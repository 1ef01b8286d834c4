-- weir.fetch_many(lease_ids): the messages of many leases, each with its lease, as weir.fetch gives them. Leases that are not held any
-- more give no row.
create or replace function weir.fetch_many(lease_ids bigint[])
returns table (
    lease_id bigint, id bigint, key text, headers jsonb, payload json, data bytea, produced_at timestamptz, attempt int,
    timeout interval
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    one bigint;
begin
    perform weir.check_reader(lease_ids);
    return query
    select d.lease_id, d.message_id, d.key, d.headers, d.payload, d.data, d.produced_at, d.attempt, d.timeout
    from weir.delivery as d
    where d.lease_id = any (lease_ids)
    order by d.lease_id;
    for one in select l.id from weir.lease as l where l.id = any (lease_ids) order by l.id loop
        return query
        select one, f.id, f.key, f.headers, f.payload, f.data, f.produced_at, f.attempt, f.timeout from weir.fetch(one) as f;
    end loop;
end
$$;
