-- weir.count_deliveries(of_group): how many deliveries of a group are leased; wait for their first attempt; wait for another, or are
-- at it; are dead. A leased one is one of the waiting or retrying, too.
--
-- Each count reads the entries of one index. Indexes: delivery_dead, delivery_due, delivery_suspect, delivery_key.
create or replace function weir.count_deliveries(
    of_group int, out leased bigint, out waiting bigint, out retrying bigint, out dead bigint
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    select count(*) into dead from weir.delivery as d where d.group_id = of_group and d.state = 'dead';
    select
        count(*) filter (where d.state = 'leased'),
        count(*) filter (where d.errors = '[]'),
        count(*) filter (where d.errors <> '[]')
    into leased, waiting, retrying
    from (
        select d.state, d.errors from weir.delivery as d
        where d.group_id = of_group and (d.state = 'leased' or d.state = 'ready' and not d.suspect)
        union all
        select d.state, d.errors from weir.delivery as d
        where d.group_id = of_group and d.state = 'ready' and d.suspect
        union all
        select d.state, d.errors from weir.delivery as d
        where d.group_id = of_group and d.state = 'parked' and d.shard is not null and d.key is not null
    ) as d;
end
$$;
