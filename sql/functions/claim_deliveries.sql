-- weir.claim_deliveries(group_id, max_attempts, consumer, max_messages, lease, max_bytes): leases deliveries that are due,
-- longest due first.
--
-- A delivery whose lease expired is a suspect from then on: its process died, or its handler was too slow, and it may be
-- why. A consumer holds one suspect at a time, so that the next death tells which one it was: only a suspect is dead after
-- its last attempt expired. Were they given out together, all that a dying process held would die with the one that
-- kills it.
--
-- Locks: rows of weir.delivery (skips those that others have). Indexes: delivery_due and delivery_suspect, which dead
-- deliveries are not in.
create or replace function weir.claim_deliveries(
    group_id int, max_attempts int, consumer text, max_messages int, lease interval, max_bytes bigint
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
    given int := 0;
    found_expired boolean := false;
begin
    select * into single from weir.claim_suspect(group_id, max_attempts, consumer, lease, null);
    if single.lease_id is not null then
        return query select single.lease_id, single.message_id, single.attempt, single.bytes;
        max_messages := max_messages - 1;
        max_bytes := max_bytes - single.bytes;
    end if;

    for taken in
        with locked as (
            select
                d.message_id, d.due_at,
                d.state = 'leased' as expired,
                d.state = 'leased' and d.suspect and d.attempt >= claim_deliveries.max_attempts as used_up,
                coalesce(octet_length(d.payload::text), octet_length(d.data)) as bytes
            from weir.delivery as d
            where d.group_id = claim_deliveries.group_id and d.state <> 'dead' and d.due_at <= now_at
              and (d.state = 'leased' or not d.suspect)
            order by d.due_at
            limit claim_deliveries.max_messages
            for update skip locked
        ),
        weighed as (
            select
                k.message_id, k.expired, k.used_up, k.bytes,
                sum(k.bytes) over by_due <= claim_deliveries.max_bytes
                    or single.lease_id is null and row_number() over by_due = 1 as kept
            from locked as k
            window by_due as (partition by k.expired order by k.due_at, k.message_id rows unbounded preceding)
        )
        update weir.delivery as d
        set state = case when k.used_up then 'dead' when k.expired then 'ready' else 'leased' end,
            suspect = k.expired,
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
        where d.group_id = claim_deliveries.group_id and d.message_id = k.message_id and (k.kept or k.expired)
        returning d.lease_id, d.message_id, d.attempt, k.bytes::bigint
    loop
        if taken.lease_id is null then
            found_expired := true;
        else
            given := given + 1;
            max_bytes := max_bytes - taken.bytes;
            return query select taken.lease_id, taken.message_id, taken.attempt, taken.bytes;
        end if;
    end loop;

    -- Those that have just become suspects are due, and nobody else will say so.
    if found_expired and single.lease_id is null and given < max_messages then
        return query
        select s.lease_id, s.message_id, s.attempt, s.bytes
        from weir.claim_suspect(group_id, max_attempts, consumer, lease, case when given > 0 then max_bytes end) as s;
    end if;
end
$$;

-- weir.claim_suspect(group_id, max_attempts, consumer, lease, max_bytes): leases the suspect that is longest due, unless the
-- consumer holds one already, or it has more than max_bytes (null: any size).
--
-- Locks: one row of weir.delivery. Index: delivery_suspect.
create or replace function weir.claim_suspect(group_id int, max_attempts int, consumer text, lease interval, max_bytes bigint)
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
        where d.group_id = claim_suspect.group_id and d.suspect and d.state <> 'dead' and d.due_at > now_at
          and d.state = 'leased' and d.consumer = claim_suspect.consumer
    ) then
        return;
    end if;
    return query
    with next as (
        select d.message_id, coalesce(octet_length(d.payload::text), octet_length(d.data))::bigint as bytes
        from weir.delivery as d
        where d.group_id = claim_suspect.group_id and d.suspect and d.state <> 'dead' and d.due_at <= now_at
          and d.state = 'ready'
        order by d.due_at
        limit 1
        for update skip locked
    )
    update weir.delivery as d
    set state = 'leased',
        due_at = clock_timestamp() + claim_suspect.lease,
        -- It may have used up its attempts in the company of others: this one, alone, is the one that counts.
        attempt = least(d.attempt + 1, claim_suspect.max_attempts),
        lease_id = nextval('weir.lease_id'),
        consumer = claim_suspect.consumer
    from next as k
    where d.group_id = claim_suspect.group_id and d.message_id = k.message_id
      and (claim_suspect.max_bytes is null or k.bytes <= claim_suspect.max_bytes)
    returning d.lease_id, d.message_id, d.attempt, k.bytes;
end
$$;
