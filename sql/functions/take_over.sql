-- weir.take_over(of_group, consumer, lease): the group's oldest expired lease of a range or a shard, given to consumer under a new
-- number, so that its former holder can do nothing with it any more. No row when others have what has expired.
--
-- One that was taken over split_after times, or has one attempt left, is split instead: each of its messages becomes a
-- delivery that is due at once and a suspect (weir.claim_deliveries), so that one that brings its process down takes no
-- neighbour with it. A suspect of an ordered group that had its last attempt is dead.
--
-- Locks: one row of weir.lease (skips those that others have). Index: lease_expiry.
create or replace function weir.take_over(of_group weir.consumer_group, consumer text, lease interval)
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
    reason constant text := 'its lease expired: the process died or the handler was too slow';
    expired weir.lease;
    last_attempt int;
    keys text[];
begin
    select l.* into expired
    from weir.lease as l
    where l.group_id = of_group.id and l.expires_at <= now_at
    order by l.expires_at
    limit 1
    for update skip locked;
    if expired.id is null then
        return;
    end if;

    -- Of retries, the one that has used up most attempts counts.
    select expired.attempt + coalesce(max(d.attempt), 0) into last_attempt
    from weir.delivery as d
    where d.group_id = of_group.id and d.message_id = any (expired.retries);

    if expired.attempt <= of_group.split_after and last_attempt < greatest(of_group.max_attempts - 1, 1)
        and not exists (
            select from weir.delivery as d
            where d.group_id = of_group.id and d.message_id = any (expired.retries) and d.suspect and d.state = 'ready'
        )
    then
        return query
        update weir.lease as l
        set id = nextval('weir.lease_id'),
            consumer = take_over.consumer,
            attempt = l.attempt + 1,
            claimed_at = clock_timestamp(),
            expires_at = clock_timestamp() + take_over.lease
        where l.id = expired.id
        returning l.*;
        return;
    end if;

    with tried as (
        update weir.delivery as d
        set state = case when d.suspect and d.attempt + expired.attempt >= of_group.max_attempts then 'dead' else d.state end,
            suspect = true,
            due_at = now_at,
            attempt = case
                when d.suspect then least(d.attempt + expired.attempt, of_group.max_attempts)
                else least(d.attempt + expired.attempt, of_group.max_attempts - 1)
            end,
            errors = d.errors || weir.error_entry(d.attempt + expired.attempt, reason)
        where d.group_id = of_group.id and d.message_id = any (expired.retries)
        returning d.key
    )
    select array_agg(distinct t.key) into keys from tried as t;
    if expired.high is not null then
        execute format(
            'with stored as (%s returning d.key) select $10 || array_agg(distinct key) from stored',
            weir.delivery_sql(of_group.id, of_group.topic_id, weir.segment_name(of_group.topic_id, expired.high),
                'case when $9 is not null and key is not null then ''parked'' else ''ready'' end', '$4', '$7', 'true', '$9', '$8',
                'id > $1 and id <= $2 and id <> all ($3)'
                    || case when expired.ids is not null then ' and id = any ($11)' else weir.filter_sql(of_group) end))
        into keys
        using
            expired.low, expired.high, coalesce(expired.done, '{}'), now_at, of_group.key_prefix, of_group.header_match,
            least(expired.attempt, of_group.max_attempts - 1),
            jsonb_build_array(weir.error_entry(expired.attempt, reason)), expired.shard, keys, expired.ids;
    end if;
    delete from weir.lease as l where l.id = expired.id;
    if expired.shard is not null then
        perform weir.order_keys(of_group.id, keys);
    end if;
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

-- weir.error_entry(attempt, error): an entry of weir.delivery.errors.
create or replace function weir.error_entry(attempt int, error text) returns jsonb
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    select jsonb_build_object('attempt', attempt, 'at', clock_timestamp(), 'error', left(error, 4000))
$$;
