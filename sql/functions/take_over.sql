-- weir.take_over(group_id, topic_id, max_attempts, split_after, consumer, lease): the group's oldest expired lease, given to
-- consumer under a new number, so that its former holder can do nothing with it any more. No row when others have what
-- has expired.
--
-- A range that was taken over split_after times, or has one attempt left, is split instead: each of its messages becomes a
-- delivery that is due at once and a suspect (weir.claim_deliveries), so that one that brings its process down takes no
-- neighbour with it.
--
-- Locks: one row of weir.lease (skips those that others have). Index: lease_expiry.
create or replace function weir.take_over(
    group_id int, topic_id int, max_attempts int, split_after int, consumer text, lease interval
)
returns setof weir.lease
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
    expired weir.lease;
begin
    select l.* into expired
    from weir.lease as l
    where l.group_id = take_over.group_id and l.expires_at <= now_at
    order by l.expires_at
    limit 1
    for update skip locked;
    if expired.id is null then
        return;
    end if;

    if expired.attempt > split_after or expired.attempt >= greatest(max_attempts - 1, 1) then
        execute format(
            'insert into weir.delivery (group_id, message_id, state, due_at, attempt, suspect, key, headers, %s, produced_at, errors)
             select $1, id, ''ready'', $5, $6, true, key, headers, payload, produced_at, $7
             from weir.%I
             where id > $2 and id <= $3 and id <> all ($4)
             on conflict do nothing',
            weir.payload_column(topic_id), weir.segment_name(topic_id, expired.high))
        using
            expired.group_id, expired.low, expired.high, coalesce(expired.done, '{}'), now_at,
            least(expired.attempt, max_attempts - 1),
            jsonb_build_array(weir.error_entry(expired.attempt, 'the lease of its range expired: the process died or the handler was too slow'));
        delete from weir.lease as l where l.id = expired.id;
        return;
    end if;

    return query
    update weir.lease as l
    set id = nextval('weir.lease_id'),
        consumer = take_over.consumer,
        attempt = l.attempt + 1,
        claimed_at = clock_timestamp(),
        expires_at = clock_timestamp() + take_over.lease
    where l.id = expired.id
    returning l.*;
end
$$;

-- weir.segment_name(topic_id, id): the table that holds that id.
create or replace function weir.segment_name(topic_id int, id bigint) returns text
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    number int;
begin
    select s.number into number
    from weir.segment as s
    where s.topic_id = segment_name.topic_id and s.high > segment_name.id
    order by s.high
    limit 1;
    return format('log_%s_%s', topic_id, number);
end
$$;

-- weir.payload_column(topic_id): the column of weir.delivery that takes a payload of this topic, with the cast it needs.
create or replace function weir.payload_column(topic_id int) returns text
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select case t.format when 'bytes' then 'data' else 'payload' end from weir.topic as t where t.id = topic_id
$$;

-- weir.error_entry(attempt, error): an entry of weir.delivery.errors.
create or replace function weir.error_entry(attempt int, error text) returns jsonb
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    select jsonb_build_object('attempt', attempt, 'at', clock_timestamp(), 'error', left(error, 4000))
$$;
