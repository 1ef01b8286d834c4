-- weir.fail(lease_id, consumer, message_id, error, retry_in, outcome): one message of a lease was not handled: it becomes a
-- delivery of its own and is tried again later, or is dead after the group's max_attempts.
--
-- error     what happened; kept with the attempt, its first 4,000 characters
-- retry_in  when to try again, 0 s to 365 days; null for the group's retry_delay, doubled with each attempt up to
--           retry_max, less up to half of it at random
-- outcome   retry (default); postpone: the attempt does not count; dead: no further attempt
--
-- The rest of the lease goes on; acknowledge it as usual when its other messages are handled. In an ordered group the later
-- messages of its key are parked behind it: they are the lease's no more, do not handle them. Called again for the same
-- message it changes nothing. Returns false, and changes nothing, when the lease is not this consumer's any more.
-- Errors: WE003, WE011 (the lease has no such message). Locks: the lease's row.
create or replace function weir.fail(
    lease_id bigint, consumer text, message_id bigint, error text, retry_in interval default null, outcome text default 'retry'
)
returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    held record;
    on_range boolean := true;
    before int := 0;
    tried int;
    next_state text;
    next_due timestamptz;
    stored int;
begin
    if retry_in is not null then
        perform weir.check_interval('retry_in', retry_in, '0 s', '365 days');
    end if;
    if outcome is null or outcome not in ('retry', 'postpone', 'dead') then
        raise exception 'outcome is %, it must be retry, postpone or dead', coalesce(quote_literal(outcome), 'null')
            using errcode = 'WE003', hint = 'Leave it out for retry.';
    end if;

    select
        l.id, l.attempt, coalesce(l.low, 0) as low, coalesce(l.high, 0) as high, l.done, l.shard, l.ids, l.retries,
        g.id as group_id, g.topic_id, g.max_attempts, g.retry_delay, g.retry_max
    into held
    from weir.lease as l
    join weir.consumer_group as g on g.id = l.group_id
    where l.id = fail.lease_id and l.consumer = fail.consumer and l.expires_at > clock_timestamp()
    for update of l;
    if held.low is null then
        on_range := false;
        select
            null::bigint as id, d.attempt, d.message_id - 1 as low, d.message_id as high, null::bigint[] as done, null::int as shard,
            null::bigint[] as ids, null::bigint[] as retries, g.id as group_id, g.topic_id, g.max_attempts, g.retry_delay, g.retry_max
        into held
        from weir.delivery as d
        join weir.consumer_group as g on g.id = d.group_id
        where d.lease_id = fail.lease_id and d.consumer = fail.consumer and d.due_at > clock_timestamp()
        for update of d;
        if held.low is null then
            return false;
        end if;
    end if;
    if message_id = any (held.done) then
        return true;
    end if;
    if held.shard is not null and coalesce(message_id <> all (coalesce(held.ids, '{}') || coalesce(held.retries, '{}')), true) then
        raise exception 'lease % has no message %', lease_id, coalesce(message_id::text, 'null')
            using errcode = 'WE011', hint = 'weir.fetch() lists the messages of the lease.';
    elsif held.shard is null and (message_id is null or message_id <= held.low or message_id > held.high) then
        raise exception 'lease % has no message %', lease_id, coalesce(message_id::text, 'null')
            using errcode = 'WE011', hint = format('It holds the ids from %s to %s.', held.low + 1, held.high);
    end if;

    if message_id = any (held.retries) then
        select d.attempt into before from weir.delivery as d where d.group_id = held.group_id and d.message_id = fail.message_id;
    end if;
    tried := before + held.attempt - case outcome when 'postpone' then 1 else 0 end;
    next_state := case when outcome = 'dead' or outcome = 'retry' and tried >= held.max_attempts then 'dead' else 'ready' end;
    next_due := clock_timestamp() + coalesce(
        retry_in,
        least(held.retry_max, held.retry_delay * power(2, least(greatest(tried, 1) - 1, 40))) * (1 - random() / 2)
    );

    if not on_range then
        update weir.delivery as d
        set state = next_state, due_at = next_due, attempt = tried, suspect = false, lease_id = null, consumer = null,
            errors = d.errors || weir.error_entry(held.attempt, fail.error)
        where d.lease_id = fail.lease_id;
        return true;
    end if;

    if held.shard is not null then
        perform weir.set_aside(held.id, message_id, next_state, next_due, tried, weir.error_entry(before + held.attempt, fail.error));
        return true;
    end if;
    execute weir.delivery_sql(held.group_id, held.topic_id, weir.segment_name(held.topic_id, held.high),
        '$2', '$3', '$4', 'false', 'null', 'jsonb_build_array($5)', 'id = $1')
    using message_id, next_state, next_due, tried, weir.error_entry(held.attempt, fail.error);
    get diagnostics stored = row_count;
    if stored = 0 and not exists (
        select from weir.delivery as d where d.group_id = held.group_id and d.message_id = fail.message_id
    ) then
        raise exception 'lease % has no message %', lease_id, message_id
            using errcode = 'WE011', hint = 'That id is a gap in the log. weir.fetch() lists the messages of the lease.';
    end if;
    update weir.lease as l set done = coalesce(l.done, '{}') || fail.message_id where l.id = fail.lease_id;
    return true;
end
$$;

-- weir.set_aside(lease_id, message_id, next_state, next_due, tried, error): a message of a shard's lease failed: stores its delivery, and
-- parks behind it what else of its key is in the lease. Were the key to go on after a message that is dead in this very lease,
-- the holder would have to be told; so it goes on with the shard's next lease.
--
-- The caller has locked the lease.
create or replace function weir.set_aside(
    lease_id bigint, message_id bigint, next_state text, next_due timestamptz, tried int, error jsonb
)
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    held weir.lease;
    topic_id int;
    segment text;
    of_key text;
    parked bigint[];
begin
    select l.* into held from weir.lease as l where l.id = set_aside.lease_id;
    select g.topic_id into topic_id from weir.consumer_group as g where g.id = held.group_id;
    segment := weir.segment_name(topic_id, held.high);
    if message_id = any (held.retries) then
        update weir.delivery as d
        set state = set_aside.next_state, due_at = set_aside.next_due, attempt = set_aside.tried, suspect = false,
            errors = d.errors || set_aside.error
        where d.group_id = held.group_id and d.message_id = set_aside.message_id
        returning d.key into of_key;
        select array_agg(d.message_id) into parked
        from weir.delivery as d
        where d.group_id = held.group_id and d.message_id = any (held.retries)
          and (d.message_id = set_aside.message_id or d.key = of_key and d.message_id > set_aside.message_id);
        update weir.lease as l
        set retries = nullif(array(select i from unnest(l.retries) as i where i <> all (parked)), '{}')
        where l.id = held.id;
    else
        execute format(
            'with failed as (
                select key from weir.%1$I where id = $1
            ),
            stored as (%2$s returning d.message_id)
            select (select array_agg(s.message_id) from stored as s), (select f.key from failed as f)',
            segment,
            weir.delivery_sql(held.group_id, topic_id, segment,
                'case when id = $1 then $2 else ''parked'' end',
                'case when id = $1 then $3 else coalesce(deliver_at, clock_timestamp()) end',
                'case when id = $1 then $4 else 0 end', 'false', '$5',
                'case when id = $1 then jsonb_build_array($6) else ''[]'' end',
                'id = any ($7) and id <> all ($8) and (id = $1 or id > $1 and key = (select f.key from failed as f))'))
        into parked, of_key
        using message_id, next_state, next_due, tried, held.shard, error, held.ids, coalesce(held.done, '{}');
    end if;
    update weir.lease as l set done = coalesce(l.done, '{}') || parked where l.id = held.id;
    perform weir.order_keys(held.group_id, array[of_key]);
end
$$;
