-- weir.fetch(lease_id): the messages of a lease, in id order.
--
-- headers and key are null where the message has none; payload is null on a bytes topic, data on the others.
-- attempt counts this one; timeout is the longest that a handler may take for it, null where the producer gave none.
-- Errors: WE010 (the lease is not held any more), 42501 (the topic is restricted).
--
-- VOLATILE, so that its statements have snapshots of their own: as a stable function inside the query that also calls
-- weir.claim() it would read with that query's snapshot, which is older than the one the range was proven for, and miss
-- messages.
create or replace function weir.fetch(lease_id bigint)
returns table (
    id bigint, key text, headers jsonb, payload json, data bytea, produced_at timestamptz, attempt int, timeout interval
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
    -- "fetch" is no qualifier in SQL, so the argument goes by a name of its own.
    wanted bigint := $1;
    held record;
    retries text;
begin
    select l.low, l.high, l.attempt, l.done, l.ids, l.retries, g as of_group, t.format, t as of_topic into held
    from weir.lease as l
    join weir.consumer_group as g on g.id = l.group_id
    join weir.topic as t on t.id = g.topic_id
    where l.id = wanted;
    if held.attempt is null then
        perform weir.check_reader(array[wanted]);
        return query
        select d.message_id, d.key, d.headers, d.payload, d.data, d.produced_at, d.attempt, d.timeout
        from weir.delivery as d
        where d.lease_id = wanted;
        if not found then
            raise exception 'lease % is not held any more', wanted
                using errcode = 'WE010',
                      hint = 'It expired and was taken over, or the group was moved. Claim again; make the lease longer or extend it.';
        end if;
        return;
    end if;
    if (held.of_topic).restricted then
        perform weir.check_right(held.of_topic, 'SELECT');
    end if;
    if held.retries is not null then
        retries :=
            'select message_id, key, headers, payload, data, produced_at, attempt + $4, timeout
             from weir.delivery
             where group_id = $8 and message_id = any ($9)';
    end if;
    if held.high is null then
        if retries is not null then
            return query execute retries || ' order by 1'
            using null, null, null, held.attempt, null, null, null, (held.of_group).id, held.retries;
        end if;
        return;
    end if;
    return query execute format(
        'select id, key, headers, %s, produced_at, $4, timeout from weir.%I where id > $1 and id <= $2%s%s%s order by 1',
        case held.format when 'bytes' then 'null::json, payload' when 'jsonb' then 'payload::json, null::bytea' else 'payload, null::bytea' end,
        weir.segment_name((held.of_group).topic_id, held.high),
        case when held.done is not null then ' and id <> all ($3)' end,
        case when held.ids is not null then ' and id = any ($7)' else weir.filter_sql(held.of_group) end,
        ' union all ' || retries)
    using
        held.low, held.high, held.done, held.attempt, (held.of_group).key_prefix, (held.of_group).header_match,
        held.ids, (held.of_group).id, held.retries;
end
$$;
