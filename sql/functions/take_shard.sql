-- weir.take_shard(of_group, shard, consumer, max_messages, lease, max_bytes): leases a free shard of an ordered group with the
-- oldest that is to be done in it: a suspect alone (weir.claim_deliveries), or else retries that are due, with what is parked
-- behind them, and new messages of one segment. lease_id is null when there was nothing after all.
--
-- A new message whose key has an open delivery, or that comes after one of its key whose deliver_at has not come, is parked:
-- it becomes a delivery that waits for the earlier ones. So a key that fails or is delayed waits, and the others go on.
--
-- max_bytes is kept to by the mean size of a range's messages.
--
-- The caller holds the shard's row in weir.shard and has found no lease. Locks: rows of weir.shard_range, against weir.seek.
-- Indexes: delivery_shard, delivery_key, primary keys.
create or replace function weir.take_shard(
    of_group weir.consumer_group, shard int, consumer text, max_messages int, lease interval, max_bytes bigint,
    out lease_id bigint, out low bigint, out high bigint, out messages int, out bytes bigint
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
    now_at timestamptz := clock_timestamp();
    retries bigint[];
    ids bigint[] := '{}'::bigint[];
    from_id bigint;
    until_id bigint;
    has_delayed boolean := false;
    part record;
    part_segment text;
    segment text;
    count_taken int;
    size_taken bigint;
begin
    messages := 0;
    bytes := 0;
    select array[d.message_id], 1, coalesce(octet_length(d.payload::text), octet_length(d.data), 0)
    into retries, messages, bytes
    from weir.delivery as d
    where d.group_id = of_group.id and d.shard = take_shard.shard and d.state = 'ready' and d.suspect and d.due_at <= now_at
      -- A consumer holds one suspect at a time, also of different shards: its death is to tell which one it was.
      and not exists (
          select
          from weir.lease as l
          join weir.delivery as h on h.group_id = l.group_id and h.message_id = any (l.retries)
          where l.group_id = of_group.id and l.consumer = take_shard.consumer and l.expires_at > now_at and h.suspect
      )
    order by d.due_at
    limit 1;

    if retries is null then
        -- What is parked behind a retry that is due goes with it, as far as it is due without a gap. Cut by id, so that
        -- none is taken without those before it.
        with heads as (
            select d.message_id, d.key, coalesce(octet_length(d.payload::text), octet_length(d.data), 0) as size
            from weir.delivery as d
            where d.group_id = of_group.id and d.shard = take_shard.shard and d.state = 'ready' and not d.suspect
              and d.due_at <= now_at
            order by d.due_at
            limit max_messages
        ),
        with_parked as (
            select h.message_id, h.size from heads as h
            union all
            select f.message_id, f.size
            from (select distinct h.key from heads as h where h.key is not null) as k
            cross join lateral (
                select p.message_id, p.size, bool_and(p.due_at <= now_at and not p.suspect) over (order by p.message_id) as due
                from (
                    select d.message_id, d.due_at, d.suspect,
                        coalesce(octet_length(d.payload::text), octet_length(d.data), 0) as size
                    from weir.delivery as d
                    where d.group_id = of_group.id and d.shard is not null and d.key = k.key and d.state = 'parked'
                    order by d.message_id
                    limit 100
                ) as p
            ) as f
            where f.due
        ),
        weighed as (
            select w.message_id, w.size, row_number() over by_id as at, sum(w.size) over by_id as sum
            from with_parked as w
            window by_id as (order by w.message_id)
        )
        select array_agg(w.message_id order by w.message_id), count(*), coalesce(sum(w.size), 0)
        into retries, messages, bytes
        from weighed as w
        where w.at <= max_messages and (w.sum <= max_bytes or w.at = 1);

        for part in
            select r.low, r.high, r.ids, r.bytes, r.delayed
            from weir.shard_range as r
            where r.group_id = of_group.id and r.shard = take_shard.shard
            order by r.low
            for update
        loop
            exit when messages >= max_messages or messages > 0 and bytes >= max_bytes;
            part_segment := weir.segment_name(of_group.topic_id, part.high);
            exit when part_segment <> segment;
            segment := part_segment;
            from_id := coalesce(from_id, part.low);
            has_delayed := has_delayed or part.delayed;
            count_taken := least(
                cardinality(part.ids), max_messages - messages,
                greatest(1, (max_bytes - bytes) * cardinality(part.ids) / greatest(part.bytes, 1))
            );
            size_taken := part.bytes * count_taken / cardinality(part.ids);
            ids := ids || part.ids[1:count_taken];
            messages := messages + count_taken;
            bytes := bytes + size_taken;
            if count_taken = cardinality(part.ids) then
                until_id := part.high;
                delete from weir.shard_range as r
                where r.group_id = of_group.id and r.shard = take_shard.shard and r.low = part.low;
            else
                until_id := part.ids[count_taken];
                update weir.shard_range as r
                set low = until_id, ids = part.ids[count_taken + 1:], bytes = part.bytes - size_taken
                where r.group_id = of_group.id and r.shard = take_shard.shard and r.low = part.low;
                exit;
            end if;
        end loop;

        if cardinality(ids) > 0 and (
            has_delayed or exists (
                select from weir.delivery as d
                where d.group_id = of_group.id and d.shard = take_shard.shard and d.state = 'ready' and d.key is not null
            )
        ) then
            ids := weir.park(of_group, shard, segment, ids, now_at);
            messages := coalesce(cardinality(retries), 0) + cardinality(ids);
        end if;
    end if;

    if messages = 0 then
        return;
    end if;
    insert into weir.lease (group_id, shard, low, high, ids, retries, consumer, attempt, expires_at)
    values (
        of_group.id, take_shard.shard, case when cardinality(ids) > 0 then from_id end, case when cardinality(ids) > 0 then until_id end,
        nullif(ids, '{}'), retries, take_shard.consumer, 1, clock_timestamp() + take_shard.lease
    )
    returning id into lease_id;
    low := least(from_id, retries[1] - 1);
    high := greatest(until_id, retries[cardinality(retries)]);
end
$$;

-- weir.park(of_group, shard, segment, ids, now_at): of these new messages of a shard, makes deliveries of those that cannot be handled now;
-- returns the others.
create or replace function weir.park(of_group weir.consumer_group, shard int, segment text, ids bigint[], now_at timestamptz)
returns bigint[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    parked bigint[];
    keys text[];
begin
    -- A key waits from its first delayed message on; a message without a key only for itself.
    execute format(
        'with waiting as (
            select id
            from (
                select id, key, deliver_at > $3 as delayed, bool_or(deliver_at > $3) over (partition by key order by id) as behind
                from weir.%1$I
                where id = any ($1)
            ) as m
            where case when key is null then delayed else behind or exists (
                select from weir.delivery as d
                where d.group_id = $2 and d.shard is not null and d.key = m.key and d.state in (''ready'', ''parked'')
            ) end
        ),
        stored as (
            %2$s
            returning d.key
        )
        select (select array_agg(w.id) from waiting as w), (select array_agg(distinct s.key) from stored as s where s.key is not null)',
        segment,
        weir.delivery_sql(of_group.id, of_group.topic_id, segment,
            'case when key is null then ''ready'' else ''parked'' end', 'coalesce(deliver_at, $3)', '0', 'false', '$4', '''[]''',
            'id in (select w.id from waiting as w)'))
    into parked, keys using ids, of_group.id, now_at, park.shard;
    perform weir.order_keys(of_group.id, keys);
    return (select coalesce(array_agg(i order by i), '{}') from unnest(ids) as i where i <> all (coalesce(parked, '{}')));
end
$$;

-- weir.order_keys(group_id, keys): sets right which deliveries of these keys of an ordered group wait: the earliest that is not dead is
-- ready, those after it are parked. Called by whatever makes or ends a delivery of a key.
--
-- Locks: rows of weir.delivery. Index: delivery_key, with two probes a key however many are parked.
create or replace function weir.order_keys(group_id int, keys text[]) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
    one text;
    earliest bigint;
begin
    for one in select distinct k from unnest(keys) as k where k is not null order by k loop
        earliest := least(
            (
                select d.message_id from weir.delivery as d
                where d.group_id = order_keys.group_id and d.shard is not null and d.key = one and d.state = 'ready'
                order by d.message_id limit 1
            ),
            (
                select d.message_id from weir.delivery as d
                where d.group_id = order_keys.group_id and d.shard is not null and d.key = one and d.state = 'parked'
                order by d.message_id limit 1
            )
        );
        update weir.delivery as d
        set state = 'parked'
        where d.group_id = order_keys.group_id and d.shard is not null and d.key = one and d.state = 'ready'
          and d.message_id > earliest;
        update weir.delivery as d
        set state = 'ready'
        where d.group_id = order_keys.group_id and d.message_id = earliest and d.state = 'parked';
    end loop;
end
$$;
