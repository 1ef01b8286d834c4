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
    now_at timestamptz := clock_timestamp();
begin
    perform from weir.fail_many(array[lease_id], consumer, array[message_id], array[error], array[retry_in], array[outcome]);
    if found then
        return true;
    end if;
    if exists (
        select from weir.lease as l
        where l.id = fail.lease_id and l.consumer = fail.consumer and l.expires_at > now_at
        union all
        select from weir.delivery as d
        where d.lease_id = fail.lease_id and d.consumer = fail.consumer and d.due_at > now_at
    ) then
        raise exception 'lease % has no message %', lease_id, coalesce(message_id::text, 'null')
            using errcode = 'WE011', hint = 'weir.fetch() lists the messages of the lease; an id between them can be a gap.';
    end if;
    return false;
end
$$;

-- weir.fail_many(lease_ids, consumer, message_ids, errors, retry_ins, outcomes): the same for many, arrays of one length; returns the
-- ids of the messages whose failure is recorded. The others are not this consumer's any more, or not of their lease.
--
-- Locks: rows of weir.lease and weir.delivery, in the order of their numbers.
create or replace function weir.fail_many(
    lease_ids bigint[], consumer text, message_ids bigint[], errors text[], retry_ins interval[], outcomes text[]
)
returns setof bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
    bad record;
    held record;
    each record;
    ids bigint[];
    states text[];
    dues timestamptz[];
    entries jsonb[];
    tries int[];
    stored bigint[];
    ranges int := 0;
begin
    select u.* into bad
    from unnest(retry_ins, outcomes) as u (retry_in, outcome)
    where u.retry_in not between interval '0 s' and interval '365 days' or coalesce(u.outcome, '') not in ('retry', 'postpone', 'dead')
    limit 1;
    if found then
        perform weir.check_interval('retry_in', coalesce(bad.retry_in, '0 s'), '0 s', '365 days');
        raise exception 'outcome is %, it must be retry, postpone or dead', coalesce(quote_literal(bad.outcome), 'null')
            using errcode = 'WE003', hint = 'Leave it out for retry.';
    end if;

    for held in
        select l.id, l.attempt, l.low, l.high, coalesce(l.done, '{}') as done, l.shard, l.ids, l.retries, g as of_group
        from weir.lease as l
        join weir.consumer_group as g on g.id = l.group_id
        where l.id = any (lease_ids) and l.consumer = fail_many.consumer and l.expires_at > clock_timestamp()
        order by l.id
        for update of l
    loop
        ranges := ranges + 1;
        return query
        select u.id from unnest(lease_ids, message_ids) as u (lease, id) where u.lease = held.id and u.id = any (held.done);

        if held.shard is not null then
            for each in
                select u.id, u.error, o.*, coalesce(d.attempt, 0) + held.attempt as attempt
                from unnest(lease_ids, message_ids, errors, retry_ins, outcomes) as u (lease, id, error, retry_in, outcome)
                left join weir.delivery as d
                    on d.group_id = (held.of_group).id and d.message_id = u.id and u.id = any (held.retries)
                cross join lateral weir.outcome(
                    held.of_group, coalesce(d.attempt, 0) + held.attempt, u.retry_in, u.outcome) as o
                where u.lease = held.id and u.id <> all (held.done)
                  and (u.id = any (held.ids) or u.id = any (held.retries))
                order by u.id
            loop
                perform weir.set_aside(
                    held.id, each.id, each.next_state, each.next_due, each.tried, weir.error_entry(each.attempt, each.error));
                return next each.id;
            end loop;
            continue;
        end if;

        select array_agg(u.id), array_agg(o.next_state), array_agg(o.next_due), array_agg(o.tried),
            array_agg(weir.error_entry(held.attempt, u.error))
        into ids, states, dues, tries, entries
        from unnest(lease_ids, message_ids, errors, retry_ins, outcomes) as u (lease, id, error, retry_in, outcome)
        cross join lateral weir.outcome(held.of_group, held.attempt, u.retry_in, u.outcome) as o
        where u.lease = held.id and u.id > held.low and u.id <= held.high and u.id <> all (held.done);
        continue when ids is null;
        execute format('with stored as (%s returning d.message_id) select array_agg(message_id) from stored',
            weir.delivery_sql((held.of_group).id, (held.of_group).topic_id, weir.segment_name((held.of_group).topic_id, held.high),
                '($2)[array_position($1, id)]', '($3)[array_position($1, id)]', '($4)[array_position($1, id)]', 'false', 'null',
                'jsonb_build_array(($5)[array_position($1, id)])', 'id = any ($1)'))
        into stored using ids, states, dues, tries, entries;
        continue when stored is null;
        update weir.lease as l set done = held.done || stored where l.id = held.id;
        return query select i from unnest(stored) as i;
    end loop;

    if ranges < cardinality(lease_ids) then
        return query
        update weir.delivery as d
        set state = k.next_state, due_at = k.next_due, attempt = k.tried, suspect = false, lease_id = null, consumer = null,
            errors = d.errors || weir.error_entry(k.attempt, k.error)
        from (
            select h.group_id, h.message_id, h.attempt, u.error, o.next_state, o.next_due, o.tried
            from unnest(lease_ids, message_ids, errors, retry_ins, outcomes) as u (lease, id, error, retry_in, outcome)
            join weir.delivery as h on h.lease_id = u.lease and h.message_id = u.id
            join weir.consumer_group as g on g.id = h.group_id
            cross join lateral weir.outcome(g, h.attempt, u.retry_in, u.outcome) as o
            where h.consumer = fail_many.consumer and h.due_at > clock_timestamp()
            order by h.lease_id
            for update of h
        ) as k
        where d.group_id = k.group_id and d.message_id = k.message_id
        returning d.message_id;
    end if;
end
$$;

-- weir.outcome(of_group, attempt, retry_in, outcome): what becomes of a message that failed in that attempt: its state, when it is due, and
-- how many attempts count.
create or replace function weir.outcome(
    of_group weir.consumer_group, attempt int, retry_in interval, outcome text,
    out next_state text, out next_due timestamptz, out tried int
)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    tried := attempt - case outcome when 'postpone' then 1 else 0 end;
    next_state := case when outcome = 'dead' or outcome = 'retry' and tried >= of_group.max_attempts then 'dead' else 'ready' end;
    next_due := clock_timestamp() + coalesce(
        retry_in,
        least(of_group.retry_max, of_group.retry_delay * power(2, least(greatest(tried, 1) - 1, 40))) * (1 - random() / 2)
    );
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
