-- weir.claim_deliveries(of_group, consumer, max_messages, lease, max_bytes): leases deliveries of a stream or queue group that are due:
-- those of the highest priority first, of one priority the longest due.
--
-- A delivery whose lease expired is a suspect from then on: its process died, or its handler was too slow, and it may be
-- why. A consumer holds one suspect at a time, so that the next death tells which one it was: only a suspect is dead after
-- its last attempt expired. Were they given out together, all that a dying process held would die with the one that
-- kills it. In a queue group, where every message has its own lease, one becomes a suspect for its last attempt only: a
-- process that dies with many jobs does not make them wait for each other.
--
-- Locks: rows of weir.delivery (skips those that others have). Indexes: delivery_next and delivery_suspect, which dead and parked
-- deliveries are not in.
create or replace function weir.claim_deliveries(
    of_group weir.consumer_group, consumer text, max_messages int, lease interval, max_bytes bigint
)
returns table (lease_id bigint, message_id bigint, attempt int, bytes bigint)
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
    single record;
    taken record;
    level int := 32767;
    first boolean := true;
    found_expired boolean := false;
    again boolean;
begin
    select * into single from weir.claim_suspect(of_group, consumer, lease, null);
    if single.lease_id is not null then
        return query select single.lease_id, single.message_id, single.attempt, single.bytes;
        max_messages := max_messages - 1;
        max_bytes := max_bytes - single.bytes;
        first := false;
    end if;

    -- Priority by priority: with priorities in one ordered scan, what is due would be sought among all that is not.
    while max_messages > 0 and (first or max_bytes > 0) loop
        select d.priority into level
        from weir.delivery as d
        where d.group_id = of_group.id and d.shard is null and (d.state = 'leased' or d.state = 'ready' and not d.suspect)
          and d.priority < level
        order by d.priority desc
        limit 1;
        exit when level is null;
        again := false;

        for taken in
            with locked as (
                select
                    d.message_id, d.due_at,
                    d.state = 'leased' as expired,
                    d.state = 'leased' and d.suspect and d.attempt >= of_group.max_attempts as used_up,
                    coalesce(octet_length(d.payload::text), octet_length(d.data), 0) as bytes
                from weir.delivery as d
                where d.group_id = of_group.id and d.shard is null and (d.state = 'leased' or d.state = 'ready' and not d.suspect)
                  and d.priority = level and d.due_at <= now_at
                order by d.due_at
                limit max_messages
                for update skip locked
            ),
            weighed as (
                select
                    k.message_id, k.expired, k.used_up, k.bytes,
                    sum(k.bytes) over by_due <= max_bytes or first and row_number() over by_due = 1 as kept
                from locked as k
                window by_due as (partition by k.expired order by k.due_at, k.message_id rows unbounded preceding)
            )
            update weir.delivery as d
            set state = case when k.used_up then 'dead' when k.expired then 'ready' else 'leased' end,
                suspect = k.expired and (of_group.mode <> 'queue' or d.attempt >= of_group.max_attempts - 1),
                due_at = case when k.expired then d.due_at else clock_timestamp() + claim_deliveries.lease end,
                attempt = case when k.expired then d.attempt else d.attempt + 1 end,
                lease_id = case when k.expired then null else nextval('weir.lease_id') end,
                consumer = case when k.expired then null else claim_deliveries.consumer end,
                errors = case
                    when k.expired then d.errors
                        || weir.error_entry(d.attempt, 'its lease expired: the process died or the handler was too slow')
                    else d.errors
                end
            from weighed as k
            where d.group_id = of_group.id and d.message_id = k.message_id and (k.kept or k.expired)
            returning d.lease_id, d.message_id, d.attempt, k.bytes::bigint, d.state = 'ready' and not d.suspect as again
        loop
            if taken.lease_id is null then
                found_expired := true;
                again := again or taken.again;
                continue;
            end if;
            max_messages := max_messages - 1;
            max_bytes := max_bytes - taken.bytes;
            first := false;
            return query select taken.lease_id, taken.message_id, taken.attempt, taken.bytes;
        end loop;
        -- What expired without becoming a suspect is due at once: one more round of this priority.
        if again then
            level := level + 1;
        end if;
    end loop;

    -- Those that have just become suspects are due, and nobody else will say so.
    if found_expired and single.lease_id is null and max_messages > 0 then
        return query
        select s.lease_id, s.message_id, s.attempt, s.bytes
        from weir.claim_suspect(of_group, consumer, lease, case when not first then max_bytes end) as s;
    end if;
end
$$;

-- weir.claim_suspect(of_group, consumer, lease, max_bytes): leases the suspect that is longest due, unless the
-- consumer holds one already, or it has more than max_bytes (null: any size).
--
-- Locks: one row of weir.delivery. Index: delivery_suspect.
create or replace function weir.claim_suspect(of_group weir.consumer_group, consumer text, lease interval, max_bytes bigint)
returns table (lease_id bigint, message_id bigint, attempt int, bytes bigint)
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
begin
    if exists (
        select from weir.delivery as d
        where d.group_id = of_group.id and d.shard is null and d.suspect and d.due_at > now_at
          and d.state = 'leased' and d.consumer = claim_suspect.consumer
    ) then
        return;
    end if;
    return query
    with next as (
        select d.message_id, coalesce(octet_length(d.payload::text), octet_length(d.data), 0)::bigint as bytes
        from weir.delivery as d
        where d.group_id = of_group.id and d.shard is null and d.suspect and d.due_at <= now_at
          and d.state = 'ready'
        order by d.due_at
        limit 1
        for update skip locked
    )
    update weir.delivery as d
    set state = 'leased',
        due_at = clock_timestamp() + claim_suspect.lease,
        -- It may have used up its attempts in the company of others: this one, alone, is the one that counts.
        attempt = least(d.attempt + 1, of_group.max_attempts),
        lease_id = nextval('weir.lease_id'),
        consumer = claim_suspect.consumer
    from next as k
    where d.group_id = of_group.id and d.message_id = k.message_id
      and (claim_suspect.max_bytes is null or k.bytes <= claim_suspect.max_bytes)
    returning d.lease_id, d.message_id, d.attempt, k.bytes;
end
$$;
