-- weir.settle(topic_id, head, own_xid, look): puts a new pair before the fence. Nothing else writes weir.fence.
--
-- topic_id  the topic
-- head      its highest visible id, read by the caller in an EARLIER statement
-- own_xid   true when this transaction had no xid at the time the head was read. Only then does its xid bound the owners
--           of the ids up to head; with an older xid, a producer with a larger one can own an id below head. Where
--           neither that nor a look is to be had, the xid of a subtransaction that begins here is the bound.
-- look      also look for the producers at work (proof by lock); READ COMMITTED only
--
-- Returns the topic's settled head as of its last statement, the new pair included where it is proven already.
--
-- A pair that waits for its proof is not overwritten while no proven one reaches as far, or nonstop traffic would keep the
-- settled head where it is; nor by a look, or what others see proven while this transaction is open would be gone with its
-- commit. A look takes a row of its own.
--
-- Locks: one row of weir.fence of this topic, never waits for one. Assigns an xid.
create or replace function weir.settle(topic_id int, head bigint, own_xid boolean, look boolean) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
declare
    seen xid8[];
    chosen int;
    proven bigint;
    settled bigint;
    later bigint;
begin
    if settle.look then
        -- pg_locks is read once (materialized) and after the head. A producer that owns an id <= head either still holds
        -- RowExclusiveLock on the topic's sequence here, with its xid's lock beside it, or has finished; then it is
        -- visible to every later statement, since a commit becomes visible before its locks are released. The lowest xid
        -- under one virtualtransaction is the top one (the others are its savepoints). A holder without an xid owns no id.
        with l as materialized (
            select locktype, database, relation, transactionid, virtualtransaction, mode
            from pg_locks
            where granted
        ),
        own as (
            -- the 32 bits of transactionid, widened: it lies within 2^31 of the next xid
            select x.virtualtransaction, min(n.xid - case when d.back > 2147483648 then d.back - 4294967296 else d.back end) as xid
            from l as x
            cross join (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint as xid) as n
            cross join lateral (select (n.xid - x.transactionid::text::bigint) & 4294967295 as back) as d
            where x.locktype = 'transactionid' and x.mode = 'ExclusiveLock'
            group by x.virtualtransaction
        )
        select coalesce(array_agg(distinct o.xid::text::xid8), '{}')
        into seen
        from l as s
        join own as o on o.virtualtransaction = s.virtualtransaction
        where s.locktype = 'relation'
          and s.mode = 'RowExclusiveLock'
          and s.database = (select d.oid from pg_database as d where d.datname = current_database())
          and s.relation = format('weir.log_%s_id', settle.topic_id)::regclass
          and o.xid is distinct from pg_current_xact_id_if_assigned()::text::bigint;
    end if;

    select max(r.bound) into proven from weir.fence_rows as r where r.topic_id = settle.topic_id;
    loop
        select f.slot
        into chosen
        from weir.fence as f
        join weir.fence_rows as r on r.topic_id = f.topic_id and r.slot = f.slot
        where f.topic_id = settle.topic_id
          and (r.pending is null or r.pending <= proven)
        order by f.slot
        limit 1
        for update of f skip locked;

        if chosen is null then
            insert into weir.fence (topic_id, slot, settled, head)
            values (settle.topic_id, (random() * 2147483646)::int + 1, coalesce(proven, 0), 0)
            returning slot into chosen;
        end if;

        -- The statement above judges the row by its snapshot, and locks it as it is now. P sees a proven pair in it. Q puts a new one in
        -- its place and commits. P locks the row, and would write over Q's pair, which others may see proven before P commits: the
        -- settled head falls. This statement is later and sees Q's pair; then P chooses anew.
        update weir.fence as f
        set settled = r.bound,
            head = settle.head,
            xid = case when settle.own_xid then pg_current_xact_id() end,
            holders = seen,
            boot = case when seen is not null then pg_postmaster_start_time() + hashtext(current_database()) * interval '1 us' end,
            observed_at = clock_timestamp()
        from weir.fence_rows as r
        where f.topic_id = settle.topic_id and f.slot = chosen
          and r.topic_id = f.topic_id and r.slot = f.slot
          and coalesce(r.pending <= proven, true);
        exit when found;
    end loop;

    if not settle.own_xid and not settle.look then
        -- A block with a handler is a subtransaction. Its xid is drawn at its first write, after the head was read: above
        -- every producer that owns an id <= head, as this transaction's own is not. It is for others to prove: this
        -- transaction itself holds xmin below it.
        begin
            update weir.fence as f
            set xid = null
            where f.topic_id = settle.topic_id and f.slot = chosen
            returning f.xmin::text::bigint into later;
            update weir.fence as f
            set xid = (n.xid - case when d.back > 2147483648 then d.back - 4294967296 else d.back end)::text::xid8
            from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint as xid) as n
            cross join lateral (select (n.xid - later) & 4294967295 as back) as d
            where f.topic_id = settle.topic_id and f.slot = chosen;
        exception
            when case_not_found then raise;
        end;
    end if;

    -- A later statement: its snapshot judges the pair.
    select max(r.bound) into settled from weir.fence_rows as r where r.topic_id = settle.topic_id;
    return settled;
end
$$;
