-- weir.fail(lease_id, consumer, message_id, error, retry_in, outcome): one message of a lease was not handled: it becomes a
-- delivery of its own and is tried again later, or is dead after the group's max_attempts.
--
-- error     what happened; kept with the attempt, its first 4,000 characters
-- retry_in  when to try again, 0 s to 365 days; null for the group's retry_delay, doubled with each attempt up to
--           retry_max, less up to half of it at random
-- outcome   retry (default); postpone: the attempt does not count; dead: no further attempt
--
-- The rest of the lease goes on; acknowledge it as usual when its other messages are handled. Called again for the same
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

    select l.attempt, l.low, l.high, l.done, g.id as group_id, g.topic_id, g.max_attempts, g.retry_delay, g.retry_max into held
    from weir.lease as l
    join weir.consumer_group as g on g.id = l.group_id
    where l.id = fail.lease_id and l.consumer = fail.consumer and l.expires_at > clock_timestamp()
    for update of l;
    if held.low is null then
        on_range := false;
        select
            d.attempt, d.message_id - 1 as low, d.message_id as high, null::bigint[] as done, g.id as group_id, g.topic_id,
            g.max_attempts, g.retry_delay, g.retry_max
        into held
        from weir.delivery as d
        join weir.consumer_group as g on g.id = d.group_id
        where d.lease_id = fail.lease_id and d.consumer = fail.consumer and d.due_at > clock_timestamp()
        for update of d;
        if held.low is null then
            return false;
        end if;
    end if;
    if message_id is null or message_id <= held.low or message_id > held.high then
        raise exception 'lease % has no message %', lease_id, coalesce(message_id::text, 'null')
            using errcode = 'WE011', hint = format('It holds the ids from %s to %s.', held.low + 1, held.high);
    end if;

    tried := held.attempt - case outcome when 'postpone' then 1 else 0 end;
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

    if message_id = any (held.done) then
        return true;
    end if;
    execute format(
        'insert into weir.delivery (group_id, message_id, state, due_at, attempt, key, headers, %s, produced_at, errors)
         select $1, id, $3, $4, $5, key, headers, payload, produced_at, jsonb_build_array($6)
         from weir.%I
         where id = $2
         on conflict do nothing',
        weir.payload_column(held.topic_id), weir.segment_name(held.topic_id, held.high))
    using held.group_id, message_id, next_state, next_due, tried, weir.error_entry(held.attempt, fail.error);
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
