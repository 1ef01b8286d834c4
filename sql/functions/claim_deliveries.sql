-- weir.claim_deliveries(group_id, max_attempts, consumer, max_messages, lease, max_bytes): leases deliveries that are due,
-- longest due first. A delivery whose last allowed attempt expired is dead and not given out.
--
-- Locks: rows of weir.delivery (skips those that others have). Index: delivery_due, which dead deliveries are not in.
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
begin
    return query
    with locked as (
        select
            d.message_id, d.due_at,
            d.state = 'leased' and d.attempt >= claim_deliveries.max_attempts as used_up,
            coalesce(octet_length(d.payload::text), octet_length(d.data)) as bytes
        from weir.delivery as d
        where d.group_id = claim_deliveries.group_id and d.state <> 'dead' and d.due_at <= now_at
        order by d.due_at
        limit claim_deliveries.max_messages
        for update skip locked
    ),
    weighed as (
        select
            k.message_id, k.used_up, k.bytes,
            sum(k.bytes) over by_due <= claim_deliveries.max_bytes or row_number() over by_due = 1 as kept
        from locked as k
        window by_due as (partition by k.used_up order by k.due_at, k.message_id rows unbounded preceding)
    ),
    changed as (
        update weir.delivery as d
        set state = case when k.used_up then 'dead' else 'leased' end,
            due_at = case when k.used_up then d.due_at else clock_timestamp() + claim_deliveries.lease end,
            attempt = case when k.used_up then d.attempt else d.attempt + 1 end,
            lease_id = case when k.used_up then null else nextval('weir.lease_id') end,
            consumer = case when k.used_up then null else claim_deliveries.consumer end,
            errors = case
                when d.state = 'leased' then d.errors
                    || weir.error_entry(d.attempt, 'its lease expired: the process died or the handler was too slow')
                else d.errors
            end
        from weighed as k
        where d.group_id = claim_deliveries.group_id and d.message_id = k.message_id and (k.kept or k.used_up)
        returning d.lease_id, d.message_id, d.attempt, k.bytes::bigint
    )
    select c.lease_id, c.message_id, c.attempt, c.bytes from changed as c where c.lease_id is not null order by c.lease_id;
end
$$;
