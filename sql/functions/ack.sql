-- weir.ack(lease_id, consumer): ends a lease: all of its messages are handled.
--
-- Returns false, and changes nothing, when the lease is not this consumer's any more: it expired, was taken over, or the
-- group was moved. Called in a transaction of the caller's, its other writes and the progress of the group become one.
-- Locks: the lease's row. Index: primary key or delivery_lease.
create or replace function weir.ack(lease_id bigint, consumer text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform from weir.ack_many(array[lease_id], consumer);
    return found;
end
$$;

-- weir.ack_many(lease_ids, consumer): the same for many; returns those that were acknowledged.
create or replace function weir.ack_many(lease_ids bigint[], consumer text) returns setof bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
as $$
declare
    acked int;
begin
    -- Expired is lost, also when nobody has taken the lease over yet: whether an acknowledgement counts is then the same
    -- whoever looks, and whenever.
    return query
    delete from weir.lease as l
    where l.id = any (lease_ids) and l.consumer = ack_many.consumer and l.expires_at > clock_timestamp()
    returning l.id;
    get diagnostics acked = row_count;
    if acked < cardinality(lease_ids) then
        return query
        delete from weir.delivery as d
        where d.lease_id = any (lease_ids) and d.consumer = ack_many.consumer and d.due_at > clock_timestamp()
        returning d.lease_id;
    end if;
end
$$;
