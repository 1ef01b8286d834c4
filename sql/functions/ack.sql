-- weir.ack(lease_id, consumer): ends a lease: all of its messages are handled.
--
-- Returns false, and changes nothing, when the lease is not this consumer's any more: it expired, was taken over, or the
-- group was moved. Called in a transaction of the caller's, its other writes and the progress of the group become one:
-- the lease's row stays locked until then, so nobody takes it over in between.
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
    ended record;
    acked int := 0;
begin
    -- Expired is lost, also when nobody has taken the lease over yet: whether an acknowledgement counts is then the same
    -- whoever looks, and whenever.
    for ended in
        delete from weir.lease as l
        where l.id = any (lease_ids) and l.consumer = ack_many.consumer and l.expires_at > clock_timestamp()
        returning l.id, l.group_id, l.retries
    loop
        if ended.retries is not null then
            perform weir.end_retries(ended.group_id, ended.retries);
        end if;
        acked := acked + 1;
        return next ended.id;
    end loop;
    if acked < cardinality(lease_ids) then
        return query
        delete from weir.delivery as d
        where d.lease_id = any (lease_ids) and d.consumer = ack_many.consumer and d.due_at > clock_timestamp()
        returning d.lease_id;
    end if;
end
$$;

-- weir.ack_messages(lease_id, consumer, message_ids, upto): of a lease, these messages are handled; the others go on.
--
-- upto  every message of the range up to this id needs no more handling; null for nothing known. It keeps the lease's list short
--
-- Returns true when that is recorded; null when it was before: whatever else the transaction did was done already, roll it
-- back; false, and changes nothing, when the lease is not this consumer's any more. Null is known only while the lease's row is
-- there: once its last message is handled, or it has become another's, what was recorded before gives false as well. Roll back
-- then, too. Errors: WE003 (some were recorded before and others not, so that no answer is true of the transaction: handle each in
-- one of its own). Locks: the lease's row, until the transaction ends.
create or replace function weir.ack_messages(lease_id bigint, consumer text, message_ids bigint[], upto bigint default null)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
as $$
declare
    held weir.lease;
    now_low bigint;
    fresh bigint[];
begin
    select l.* into held
    from weir.lease as l
    where l.id = ack_messages.lease_id and l.consumer = ack_messages.consumer and l.expires_at > clock_timestamp()
    for update;
    if held.id is null then
        delete from weir.delivery as d
        where d.lease_id = ack_messages.lease_id and d.consumer = ack_messages.consumer and d.due_at > clock_timestamp()
          and d.message_id = any (message_ids);
        return found;
    end if;

    fresh := array(
        select i from unnest(message_ids) as i
        where case
            when held.shard is null then i > held.low and i <= held.high and i <> all (coalesce(held.done, '{}'))
            else i = any (held.retries) or i = any (held.ids) and i <> all (coalesce(held.done, '{}'))
        end
    );
    if fresh = '{}' then
        return null;
    elsif cardinality(fresh) < cardinality(message_ids) then
        raise exception 'of the messages % of lease %, only % are to be acknowledged', message_ids, lease_id, fresh
            using errcode = 'WE003', hint = 'The others were before. Handle each message in a transaction of its own.';
    end if;

    if held.shard is null then
        now_low := least(greatest(held.low, upto), held.high);
        if now_low = held.high then
            delete from weir.lease as l where l.id = held.id;
        else
            update weir.lease as l
            set low = now_low,
                done = nullif(array(select i from unnest(coalesce(held.done, '{}') || fresh) as i where i > now_low), '{}')
            where l.id = held.id;
        end if;
        return true;
    end if;

    if held.retries && fresh then
        perform weir.end_retries(
            held.group_id, array(select i from unnest(held.retries) as i where i = any (fresh))
        );
    end if;
    update weir.lease as l
    set retries = nullif(array(select i from unnest(held.retries) as i where i <> all (fresh)), '{}'),
        done = nullif(coalesce(held.done, '{}') || array(select i from unnest(held.ids) as i where i = any (fresh)), '{}')
    where l.id = held.id;
    return true;
end
$$;

-- weir.end_retries(group_id, message_ids): these deliveries of an ordered group are handled; what waits for them goes on.
create or replace function weir.end_retries(group_id int, message_ids bigint[]) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
as $$
declare
    keys text[];
begin
    with ended as (
        delete from weir.delivery as d
        where d.group_id = end_retries.group_id and d.message_id = any (message_ids) and d.state <> 'dead'
        returning d.key
    )
    select array_agg(distinct e.key) into keys from ended as e;
    perform weir.order_keys(group_id, keys);
end
$$;
