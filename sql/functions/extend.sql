-- weir.extend(lease_id, consumer, lease): the lease now ends that long from now, by the server's clock.
--
-- lease: 100 ms to 1 day. Returns false, and changes nothing, when it is not this consumer's any more. Locks: the lease's row.
create or replace function weir.extend(lease_id bigint, consumer text, lease interval) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform from weir.extend_many(array[lease_id], consumer, lease, false);
    return found;
end
$$;

-- weir.extend_many(lease_ids, consumer, lease, own_transaction): the same for many; returns those that are still held. own_transaction
-- as in weir.poll.
create or replace function weir.extend_many(lease_ids bigint[], consumer text, lease interval, own_transaction boolean)
returns setof bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
-- Rows are locked in the order of their numbers, as by handlers that acknowledge in a transaction of theirs.
set enable_bitmapscan = off
as $$
begin
    perform weir.check_interval('lease', lease, '100 ms', '1 day');
    if own_transaction then
        perform set_config('synchronous_commit', 'off', true);
    end if;
    return query
    update weir.lease as l
    set expires_at = clock_timestamp() + lease
    where l.id = any (lease_ids) and l.consumer = extend_many.consumer and l.expires_at > clock_timestamp()
    returning l.id;
    return query
    update weir.delivery as d
    set due_at = clock_timestamp() + lease
    where d.lease_id = any (lease_ids) and d.consumer = extend_many.consumer and d.due_at > clock_timestamp()
    returning d.lease_id;
    -- Presence costs nothing more here, and nothing at all while a consumer is idle.
    update weir.consumer as c
    set seen_at = clock_timestamp()
    where c.name = extend_many.consumer and c.group_id in (
        select l.group_id from weir.lease as l where l.id = any (lease_ids)
        union
        select d.group_id from weir.delivery as d where d.lease_id = any (lease_ids)
    );
end
$$;
