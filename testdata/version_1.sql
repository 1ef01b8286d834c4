-- The install of schema version 1, as the release that had it made it.
create schema weir;

create table weir.meta (
    only_row boolean primary key default true constraint meta_one_row check (only_row),
    version int not null,
    compatible int not null,
    functions text not null default '',
    changed_at timestamptz not null default clock_timestamp()
);

create table weir.topic (
    id int generated always as identity primary key,
    name text not null constraint topic_name_unique unique,
    format text not null constraint topic_format check (format in ('json', 'jsonb', 'bytes')),
    sequence regclass not null,
    segment_size bigint not null constraint topic_segment_size check (segment_size between 1000 and 1000000000),
    created_at timestamptz not null default clock_timestamp()
);

create table weir.segment (
    topic_id int not null references weir.topic (id),
    number int not null,
    low bigint not null,
    high bigint not null,
    created_at timestamptz not null default clock_timestamp(),
    primary key (topic_id, high),
    constraint segment_low_unique unique (topic_id, low),
    constraint segment_number_unique unique (topic_id, number),
    constraint segment_bounds check (low < high)
);

create table weir.fence (
    topic_id int not null references weir.topic (id),
    slot int not null,
    settled bigint not null,
    head bigint not null,
    xid xid8,
    holders xid8[],
    boot timestamptz,
    observed_at timestamptz not null default clock_timestamp(),
    primary key (topic_id, slot)
) with (fillfactor = 50);

create table weir.consumer_group (
    id int generated always as identity primary key,
    topic_id int not null references weir.topic (id),
    name text not null,
    mode text not null constraint group_mode check (mode in ('stream')),
    max_attempts int not null constraint group_max_attempts check (max_attempts between 1 and 1000),
    retry_delay interval not null,
    retry_max interval not null,
    split_after int not null constraint group_split_after check (split_after between 1 and 1000),
    created_at timestamptz not null default clock_timestamp(),
    constraint group_name_unique unique (topic_id, name)
);

create table weir.cursor (
    group_id int primary key references weir.consumer_group (id),
    claimed bigint not null
) with (fillfactor = 50);

create sequence weir.lease_id as bigint cache 1 no cycle;

create table weir.lease (
    id bigint primary key default nextval('weir.lease_id'),
    group_id int not null references weir.consumer_group (id),
    low bigint not null,
    high bigint not null,
    consumer text not null,
    attempt int not null,
    claimed_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    done bigint[],
    constraint lease_bounds check (low < high)
) with (fillfactor = 50);
create index lease_expiry on weir.lease (group_id, expires_at);

create table weir.delivery (
    group_id int not null references weir.consumer_group (id),
    message_id bigint not null,
    state text not null constraint delivery_state check (state in ('ready', 'leased', 'dead')),
    due_at timestamptz not null,
    attempt int not null,
    suspect boolean not null default false,
    lease_id bigint,
    consumer text,
    key text,
    headers jsonb,
    payload json,
    data bytea,
    produced_at timestamptz not null,
    errors jsonb not null default '[]',
    created_at timestamptz not null default clock_timestamp(),
    primary key (group_id, message_id),
    constraint delivery_leased check ((state = 'leased') = (lease_id is not null))
) with (fillfactor = 70);
create index delivery_due on weir.delivery (group_id, due_at) where state <> 'dead';
create index delivery_suspect on weir.delivery (group_id, due_at) where suspect and state <> 'dead';
create unique index delivery_lease on weir.delivery (lease_id) where lease_id is not null;
create index delivery_dead on weir.delivery (group_id, message_id) where state = 'dead';
create or replace function weir.ack(lease_id bigint, consumer text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform from weir.ack_many(array[lease_id], consumer);
    return found;
end
$$;

create or replace function weir.ack_many(lease_ids bigint[], consumer text) returns setof bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
as $$
declare
    acked int;
begin
    return query
    delete from weir.lease as l
    where l.id = any (lease_ids) and l.consumer = ack_many.consumer and l.expires_at > clock_timestamp()
    returning l.id;
    get diagnostics acked = row_count;
    if acked < cardinality(lease_ids) then
        return query
        delete from weir.delivery as d
        where d.lease_id = any (lease_ids) and d.consumer = ack_many.consumer and d.due_at > clock_timestamp()
        returning d.lease_id;
    end if;
end
$$;
create or replace function weir.check_name(field text, value text) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if value is null or value = '' or char_length(value) > 200 then
        raise exception '% must have 1 to 200 characters, it has %', field, coalesce(char_length(value), 0)
            using errcode = 'WE003', hint = 'Choose a shorter, non-empty name.';
    end if;
    if value ~ '[[:cntrl:]]' or value <> btrim(value) then
        raise exception '% must not contain control characters nor begin or end with a space', field
            using errcode = 'WE003', hint = 'Any other character is allowed: dots, quotes, capitals, spaces within, non-ASCII.';
    end if;
end
$$;

create or replace function weir.check_range(field text, value numeric, low numeric, high numeric) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if value is null or value not between low and high then
        raise exception '% is %, it must be from % to %', field, coalesce(value::text, 'null'), low, high
            using errcode = 'WE003', hint = format('Give %s a value within that range.', field);
    end if;
end
$$;

create or replace function weir.check_interval(field text, value interval, low interval, high interval) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if value is null or value not between low and high then
        raise exception '% is %, it must be from % to %', field, coalesce(value::text, 'null'), low, high
            using errcode = 'WE003', hint = format('Give %s a length of time within that range.', field);
    end if;
end
$$;

create or replace function weir.check_options(options jsonb, allowed text[]) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
    unknown text;
begin
    if options is null or jsonb_typeof(options) <> 'object' then
        raise exception 'options must be a JSON object'
            using errcode = 'WE003', hint = format('Known options: %s.', array_to_string(allowed, ', '));
    end if;
    select k into unknown from jsonb_object_keys(options) as k where k <> all (allowed) order by k limit 1;
    if unknown is not null then
        raise exception 'unknown option %', quote_literal(unknown)
            using errcode = 'WE003', hint = format('Known options: %s.', array_to_string(allowed, ', '));
    end if;
end
$$;

create or replace function weir.option_number(options jsonb, field text, fallback bigint) returns bigint
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if not options ? field or options -> field = 'null' then
        return fallback;
    end if;
    if (options ->> field) !~ '^-?[0-9]{1,18}$' then
        raise exception 'option % is %, it must be a whole number', field, options -> field
            using errcode = 'WE003', hint = format('Give %s a whole number, or leave it out for %s.', field, fallback);
    end if;
    return (options ->> field)::bigint;
end
$$;

create or replace function weir.option_interval(options jsonb, field text, fallback interval) returns interval
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if not options ? field or options -> field = 'null' then
        return fallback;
    end if;
    return (options ->> field)::interval;
exception
    when invalid_datetime_format or datetime_field_overflow or interval_field_overflow then
        raise exception 'option % is %, it must be a length of time', field, options -> field
            using errcode = 'WE003', hint = format('Write it as "5 s", "10 min" or "2 h", or leave it out for %s.', fallback);
end
$$;
create or replace function weir.check_primary() returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if pg_is_in_recovery() then
        raise exception 'this server is a standby: it can be read with weir.read(), but not claimed from or produced to'
            using errcode = 'WE006',
                  detail = 'A standby gives out no transaction ids, so nothing can be written and the fence cannot move.',
                  hint = 'Connect to the primary, for example with target_session_attrs=read-write in the connection string.';
    end if;
end
$$;
create or replace function weir.check_sequence(topic_id int, settled bigint, drawn bigint) returns void
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    seq text := format('weir.log_%s_id', check_sequence.topic_id);
    found_sequence pg_sequence;
    repair text;
begin
    select s.* into found_sequence from pg_sequence as s where s.seqrelid = seq::regclass;
    if found_sequence.seqcache <> 1 or found_sequence.seqcycle or found_sequence.seqincrement <> 1 then
        raise exception 'sequence % has cache %, increment %, cycle %: its ids do not rise one by one',
            seq, found_sequence.seqcache, found_sequence.seqincrement, found_sequence.seqcycle
            using errcode = 'WE008',
                  detail = 'Messages could appear below the settled head and be skipped.',
                  hint = format('Run: alter sequence %s increment 1 cache 1 no cycle; then reconnect every producer.', seq);
    end if;
    if settled > drawn then
        execute format(
            'select greatest((select max(r.bound) from weir.fence_rows as r where r.topic_id = $1), max(l.id)) from weir.log_%s as l',
            topic_id)
        into settled using topic_id;
    end if;
    if drawn < settled then
        select string_agg(format('setval(%L, %s)', r.name, r.value), ', ' order by r.place)
        into repair
        from (
            select 1 as place, seq as name, settled as value
            union all
            select 2, 'weir.lease_id', 1000000 + greatest(
                q.last_value, (select max(l.id) from weir.lease as l), (select max(d.lease_id) from weir.delivery as d)
            )
            from weir.lease_id as q
            union all
            select 3, pg_get_serial_sequence('weir.topic', 'id'), max(t.id)
            from weir.topic as t
            having max(t.id) > coalesce(pg_sequence_last_value(pg_get_serial_sequence('weir.topic', 'id')::regclass), 0)
            union all
            select 4, pg_get_serial_sequence('weir.consumer_group', 'id'), max(g.id)
            from weir.consumer_group as g
            having max(g.id) > coalesce(pg_sequence_last_value(pg_get_serial_sequence('weir.consumer_group', 'id')::regclass), 0)
        ) as r;
        raise exception 'sequence % stands at %, below id %, which was given out already: it would issue ids again', seq, drawn, settled
            using errcode = 'WE007',
                  detail = 'This happens where tables were copied or replicated without their sequences.',
                  hint = format('Run: select %s;', repair);
    end if;
end
$$;
create or replace function weir.claim(
    topic text, grp text, consumer text, max_messages int default 100, lease interval default '15 s',
    max_bytes bigint default 4194304
)
returns table (lease_id bigint, low bigint, high bigint, attempt int)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    if max_messages is null or max_messages < 1 then
        perform weir.check_range('max_messages', max_messages, 1, 10000);
    end if;
    return query
    select p.lease_id, p.low, p.high, p.attempt
    from weir.poll(topic, grp, consumer, max_messages, lease, max_bytes, null, false) as p
    where p.lease_id is not null;
end
$$;
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

    if found_expired and single.lease_id is null and given < max_messages then
        return query
        select s.lease_id, s.message_id, s.attempt, s.bytes
        from weir.claim_suspect(group_id, max_attempts, consumer, lease, case when given > 0 then max_bytes end) as s;
    end if;
end
$$;

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
        attempt = least(d.attempt + 1, claim_suspect.max_attempts),
        lease_id = nextval('weir.lease_id'),
        consumer = claim_suspect.consumer
    from next as k
    where d.group_id = claim_suspect.group_id and d.message_id = k.message_id
      and (claim_suspect.max_bytes is null or k.bytes <= claim_suspect.max_bytes)
    returning d.lease_id, d.message_id, d.attempt, k.bytes;
end
$$;
create or replace function weir.claim_range(
    group_id int, topic_id int, format text, settled bigint, consumer text, max_messages int, lease interval, max_bytes bigint
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
    position bigint;
    start bigint;
    part record;
    scanned int;
    messages int;
    last_id bigint;
    taken weir.lease;
begin
    select c.claimed into position from weir.cursor as c where c.group_id = claim_range.group_id for no key update;
    start := position;
    while position < settled loop
        select s.number, s.low, s.high into part
        from weir.segment as s
        where s.topic_id = claim_range.topic_id and s.high > position + 1
        order by s.high
        limit 1;
        exit when part.number is null;
        position := greatest(position, part.low - 1);
        execute format(
            'select count(*) as scanned, count(*) filter (where kept) as messages, max(id) filter (where kept) as last_id
             from (
                 select id, sum(bytes) over by_id <= $4 or row_number() over by_id = 1 as kept
                 from (
                     select id, %s as bytes from weir.log_%s_%s where id > $1 and id <= $2 order by id limit $3
                 ) as next
                 window by_id as (order by id rows unbounded preceding)
             ) as weighed',
            case format when 'jsonb' then 'pg_column_size(payload)' when 'bytes' then 'octet_length(payload)'
                else 'octet_length(payload::text)' end,
            topic_id, part.number)
        into scanned, messages, last_id using position, settled, max_messages, max_bytes;
        if messages > 0 then
            insert into weir.lease (group_id, low, high, consumer, attempt, expires_at)
            values (
                claim_range.group_id, position,
                case when scanned = max_messages or messages < scanned then last_id
                    else least(settled, part.high - 1) end,
                claim_range.consumer, 1, clock_timestamp() + claim_range.lease
            )
            returning * into taken;
            update weir.cursor as c set claimed = taken.high where c.group_id = claim_range.group_id;
            return next taken;
            return;
        end if;
        position := least(settled, part.high - 1);
    end loop;
    if position > start then
        update weir.cursor as c set claimed = position where c.group_id = claim_range.group_id;
    end if;
end
$$;
create or replace function weir.create_group(topic text, grp text, options jsonb default '{}') returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    on_topic weir.topic;
    found_group weir.consumer_group;
    wanted_mode text;
    wanted_attempts bigint;
    wanted_split bigint;
    wanted_delay interval;
    wanted_max interval;
    first_claimed bigint;
begin
    perform weir.check_primary();
    perform weir.check_name('group', grp);
    on_topic := weir.topic_named(topic);
    perform weir.check_options(options, array['mode', 'start', 'max_attempts', 'retry_delay', 'retry_max', 'split_after']);
    wanted_mode := coalesce(options ->> 'mode', 'stream');
    if wanted_mode <> 'stream' then
        raise exception 'option mode is %, it must be stream', quote_literal(wanted_mode)
            using errcode = 'WE003', hint = 'Leave mode out for stream.';
    end if;
    wanted_attempts := weir.option_number(options, 'max_attempts', 10);
    perform weir.check_range('option max_attempts', wanted_attempts, 1, 1000);
    wanted_split := weir.option_number(options, 'split_after', 3);
    perform weir.check_range('option split_after', wanted_split, 1, 1000);
    wanted_delay := weir.option_interval(options, 'retry_delay', '1 s');
    perform weir.check_interval('option retry_delay', wanted_delay, '0 s', '7 days');
    wanted_max := weir.option_interval(options, 'retry_max', greatest(interval '10 min', wanted_delay));
    perform weir.check_interval('option retry_max', wanted_max, wanted_delay, '30 days');

    select g.* into found_group from weir.consumer_group as g where g.topic_id = on_topic.id and g.name = grp;
    if found_group.id is null then
        perform pg_advisory_xact_lock(hashtextextended('weir.create_group', on_topic.id));
        select g.* into found_group from weir.consumer_group as g where g.topic_id = on_topic.id and g.name = grp;
    end if;
    if found_group.id is not null then
        if options ? 'mode' and found_group.mode <> wanted_mode then
            raise exception 'group % exists with mode %, not %', quote_literal(grp), found_group.mode, wanted_mode
                using errcode = 'WE004', hint = 'Use the mode it has, or choose another name.';
        end if;
        return found_group.id;
    end if;

    first_claimed := weir.position(on_topic.id, coalesce(options -> 'start', '"beginning"'), 'option start');
    insert into weir.consumer_group (topic_id, name, mode, max_attempts, retry_delay, retry_max, split_after)
    values (on_topic.id, grp, wanted_mode, wanted_attempts, wanted_delay, wanted_max, wanted_split)
    returning * into found_group;
    insert into weir.cursor (group_id, claimed) values (found_group.id, first_claimed);
    return found_group.id;
end
$$;
create or replace function weir.create_topic(topic text, options jsonb default '{}') returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    found_topic weir.topic;
    new_id int;
    wanted_format text;
    size bigint;
begin
    perform weir.check_primary();
    perform weir.check_name('topic', topic);
    perform weir.check_options(options, array['format', 'segment_size']);
    wanted_format := coalesce(options ->> 'format', 'json');
    if wanted_format not in ('json', 'jsonb', 'bytes') then
        raise exception 'option format is %, it must be json, jsonb or bytes', quote_literal(wanted_format)
            using errcode = 'WE003', hint = 'json keeps the text as it was given, jsonb is for queries, bytes is for anything else.';
    end if;
    size := weir.option_number(options, 'segment_size', 1000000);
    perform weir.check_range('option segment_size', size, 1000, 1000000000);

    select t.* into found_topic from weir.topic as t where t.name = create_topic.topic;
    if found_topic.id is null then
        perform pg_advisory_xact_lock(hashtextextended('weir.create_topic', 0));
        select t.* into found_topic from weir.topic as t where t.name = create_topic.topic;
    end if;
    if found_topic.id is not null then
        if options ? 'format' and found_topic.format <> wanted_format then
            raise exception 'topic % exists with format %, not %', quote_literal(topic), found_topic.format, wanted_format
                using errcode = 'WE004', hint = 'Use the format it has, or choose another name.';
        end if;
        return found_topic.id;
    end if;

    new_id := nextval(pg_get_serial_sequence('weir.topic', 'id'));
    execute format('create sequence weir.log_%s_id as bigint increment 1 minvalue 1 start 1 cache 1 no cycle', new_id);
    insert into weir.topic (id, name, format, sequence, segment_size) overriding system value
    values (new_id, topic, wanted_format, format('weir.log_%s_id', new_id)::regclass, size);
    execute format(
        'create table weir.log_%1$s (
            id bigint not null default case when pg_current_xact_id() is not null then nextval(''weir.log_%1$s_id'') end,
            produced_at timestamptz not null default clock_timestamp(),
            key text,
            headers jsonb constraint log_headers check (jsonb_typeof(headers) = ''object''),
            payload %2$s not null,
            constraint log_%1$s_pk primary key (id)
        ) partition by range (id)',
        new_id, case wanted_format when 'bytes' then 'bytea' else wanted_format end);
    execute format('alter sequence weir.log_%1$s_id owned by weir.log_%1$s.id', new_id);
    insert into weir.fence (topic_id, slot, settled, head) values (new_id, 0, 0, 0);
    perform weir.extend_log(new_id, size);
    return new_id;
end
$$;
create or replace function weir.redrive(topic text, grp text, message_id bigint default null) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    of_group weir.consumer_group := weir.group_named(topic, grp);
    changed bigint;
begin
    perform weir.check_primary();
    update weir.delivery as d
    set state = 'ready', due_at = clock_timestamp(), attempt = 0
    where d.group_id = of_group.id and d.state = 'dead' and d.message_id = coalesce(redrive.message_id, d.message_id);
    get diagnostics changed = row_count;
    return changed;
end
$$;

create or replace function weir.purge(topic text, grp text, message_id bigint default null) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    of_group weir.consumer_group := weir.group_named(topic, grp);
    changed bigint;
begin
    perform weir.check_primary();
    delete from weir.delivery as d
    where d.group_id = of_group.id and d.state = 'dead' and d.message_id = coalesce(purge.message_id, d.message_id);
    get diagnostics changed = row_count;
    return changed;
end
$$;
create or replace function weir.drop_group(topic text, grp text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    on_topic weir.topic := weir.topic_named(topic);
    dropped int;
begin
    perform weir.check_primary();
    select g.id into dropped
    from weir.consumer_group as g
    where g.topic_id = on_topic.id and g.name = grp
    for update;
    if dropped is null then
        return false;
    end if;
    delete from weir.lease as l where l.group_id = dropped;
    delete from weir.delivery as d where d.group_id = dropped;
    delete from weir.cursor as c where c.group_id = dropped;
    delete from weir.lease as l where l.group_id = dropped;
    delete from weir.delivery as d where d.group_id = dropped;
    delete from weir.consumer_group as g where g.id = dropped;
    return true;
end
$$;
create or replace function weir.drop_topic(topic text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    dropped int;
begin
    perform weir.check_primary();
    select t.id into dropped from weir.topic as t where t.name = drop_topic.topic for update;
    if dropped is null then
        return false;
    end if;
    for turn in 1..2 loop
        delete from weir.lease as l using weir.consumer_group as g where l.group_id = g.id and g.topic_id = dropped;
        delete from weir.delivery as d using weir.consumer_group as g where d.group_id = g.id and g.topic_id = dropped;
        delete from weir.cursor as c using weir.consumer_group as g where c.group_id = g.id and g.topic_id = dropped;
    end loop;
    execute format('drop table weir.log_%s', dropped);
    delete from weir.consumer_group as g where g.topic_id = dropped;
    delete from weir.segment as s where s.topic_id = dropped;
    delete from weir.fence as f where f.topic_id = dropped;
    delete from weir.topic as t where t.id = dropped;
    return true;
end
$$;
create or replace function weir.extend(lease_id bigint, consumer text, lease interval) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform from weir.extend_many(array[lease_id], consumer, lease, false);
    return found;
end
$$;

create or replace function weir.extend_many(lease_ids bigint[], consumer text, lease interval, own_transaction boolean)
returns setof bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
set jit = off
set enable_seqscan = off
as $$
begin
    perform weir.check_interval('lease', lease, '100 ms', '1 day');
    if own_transaction then
        perform set_config('synchronous_commit', 'off', true);
    end if;
    return query
    update weir.lease as l
    set expires_at = clock_timestamp() + lease
    where l.id = any (lease_ids) and l.consumer = extend_many.consumer and l.expires_at > clock_timestamp()
    returning l.id;
    return query
    update weir.delivery as d
    set due_at = clock_timestamp() + lease
    where d.lease_id = any (lease_ids) and d.consumer = extend_many.consumer and d.due_at > clock_timestamp()
    returning d.lease_id;
end
$$;
create or replace function weir.extend_log(topic_id int, need bigint, wait boolean default true) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    gate bigint := hashtextextended('weir.extend_log', extend_log.topic_id);
    size bigint;
    last record;
begin
    if extend_log.wait then
        perform pg_advisory_xact_lock(gate);
    elsif not pg_try_advisory_xact_lock(gate) then
        return;
    end if;
    select t.segment_size into size from weir.topic as t where t.id = extend_log.topic_id;
    loop
        select coalesce(max(s.number), 0) as number, coalesce(max(s.high), 1) as high
        into last
        from weir.segment as s
        where s.topic_id = extend_log.topic_id;
        exit when last.high > need + size;
        exit when to_regclass(format('weir.log_%s_%s', topic_id, last.number + 1)) is not null;
        execute format(
            'create table weir.log_%1$s_%2$s (like weir.log_%1$s including defaults including constraints including storage)',
            topic_id, last.number + 1);
        execute format(
            'alter table weir.log_%1$s_%2$s add constraint log_%1$s_%2$s_pk primary key (id)',
            topic_id, last.number + 1);
        execute format(
            'alter table weir.log_%1$s attach partition weir.log_%1$s_%2$s for values from (%3$s) to (%4$s)',
            topic_id, last.number + 1, last.high, last.high + size);
        insert into weir.segment (topic_id, number, low, high)
        values (extend_log.topic_id, last.number + 1, last.high, last.high + size);
    end loop;
end
$$;
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
create or replace function weir.fetch(lease_id bigint)
returns table (id bigint, key text, headers jsonb, payload json, data bytea, produced_at timestamptz, attempt int)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
    wanted bigint := $1;
    held record;
begin
    select l.low, l.high, l.attempt, l.done, t.id as topic_id, t.format into held
    from weir.lease as l
    join weir.consumer_group as g on g.id = l.group_id
    join weir.topic as t on t.id = g.topic_id
    where l.id = wanted;
    if held.low is null then
        return query
        select d.message_id, d.key, d.headers, d.payload, d.data, d.produced_at, d.attempt
        from weir.delivery as d
        where d.lease_id = wanted;
        if not found then
            raise exception 'lease % is not held any more', wanted
                using errcode = 'WE010',
                      hint = 'It expired and was taken over, or the group was moved. Claim again; make the lease longer or extend it.';
        end if;
        return;
    end if;
    return query execute format(
        'select id, key, headers, %s, produced_at, $4 from weir.%I where id > $1 and id <= $2%s order by id',
        case held.format when 'bytes' then 'null::json, payload' when 'jsonb' then 'payload::json, null::bytea' else 'payload, null::bytea' end,
        weir.segment_name(held.topic_id, held.high),
        case when held.done is not null then ' and id <> all ($3)' end)
    using held.low, held.high, held.done, held.attempt;
end
$$;
create or replace function weir.fetch_deliveries(lease_ids bigint[])
returns table (lease_id bigint, id bigint, key text, headers jsonb, payload json, data bytea, produced_at timestamptz, attempt int)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
begin
    return query
    select d.lease_id, d.message_id, d.key, d.headers, d.payload, d.data, d.produced_at, d.attempt
    from weir.delivery as d
    where d.lease_id = any (lease_ids)
    order by d.lease_id;
end
$$;
create or replace function weir.finished(xids xid8[]) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    now_snapshot pg_snapshot := pg_current_snapshot();
    x xid8;
begin
    if pg_is_in_recovery() then
        return false;
    end if;
    foreach x in array xids loop
        if not pg_visible_in_snapshot(x, now_snapshot) then
            return false;
        end if;
    end loop;
    return true;
end
$$;
create or replace function weir.group_named(topic text, grp text) returns weir.consumer_group
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    found_topic weir.topic := weir.topic_named(topic);
    found_group weir.consumer_group;
begin
    select g.* into found_group
    from weir.consumer_group as g
    where g.topic_id = found_topic.id and g.name = group_named.grp;
    if found_group.id is null or not exists (select from weir.cursor as c where c.group_id = found_group.id) then
        raise exception 'group % does not exist on topic %', coalesce(quote_literal(grp), 'null'), quote_literal(topic)
            using errcode = 'WE002', hint = 'Create it with weir.create_group(), or correct the name: weir.groups lists them.';
    end if;
    return found_group;
end
$$;
create or replace function weir.head(topic_id int, above bigint) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    drawn bigint;
    part record;
    found_id bigint;
begin
    drawn := weir.drawn(head.topic_id);
    for part in
        select s.number
        from weir.segment as s
        where s.topic_id = head.topic_id and s.low <= drawn and s.high > head.above
        order by s.high desc
    loop
        execute format('select id from weir.log_%s_%s where id > $1 order by id desc limit 1', head.topic_id, part.number)
        into found_id using head.above;
        if found_id is not null then
            return found_id;
        end if;
    end loop;
    return null;
end
$$;

create or replace function weir.drawn(topic_id int) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    last_value bigint;
begin
    execute format('select case when is_called then last_value else 0 end from weir.log_%s_id', topic_id) into last_value;
    return last_value;
end
$$;
create or replace function weir.poll(
    topic text, grp text, consumer text, max_messages int, lease interval, max_bytes bigint, acks bigint[], own_transaction boolean
)
returns table (state text, lease_id bigint, low bigint, high bigint, attempt int)
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
    w record;
    drawn bigint;
    expired boolean;
    due boolean;
    look boolean;
    head bigint;
    settled bigint;
    taken record;
begin
    if max_messages is null or max_messages not between 0 and 10000 then
        perform weir.check_range('max_messages', max_messages, 0, 10000);
    end if;
    if lease is null or lease not between interval '100 ms' and interval '1 day' then
        perform weir.check_interval('lease', lease, '100 ms', '1 day');
    end if;
    if max_bytes is null or max_bytes < 1 then
        perform weir.check_range('max_bytes', max_bytes, 1, 9e18);
    end if;
    if consumer is null or consumer = '' then
        perform weir.check_name('consumer', consumer);
    end if;

    select
        t.id as topic_id, t.format, t.sequence, t.segment_size, g.id as group_id, g.max_attempts, g.split_after, c.claimed,
        f.bound, f.pending, f.reached, f.overdue,
        pg_is_in_recovery() as standby,
        pg_current_xact_id_if_assigned() is null as no_xid,
        (select l.expires_at from weir.lease as l where l.group_id = g.id order by l.expires_at limit 1) as next_expiry,
        (
            select d.due_at from weir.delivery as d where d.group_id = g.id and d.state <> 'dead' order by d.due_at limit 1
        ) as next_due
    into w
    from weir.topic as t
    left join weir.consumer_group as g on g.topic_id = t.id and g.name = poll.grp
    left join weir.cursor as c on c.group_id = g.id
    left join lateral (
        select max(r.bound) as bound, max(r.pending) as pending, max(r.reached) as reached,
            bool_and(r.overdue) filter (where r.pending is not null) as overdue
        from weir.fence_rows as r
        where r.topic_id = t.id
    ) as f on true
    where t.name = poll.topic;

    if w.claimed is null then
        perform weir.group_named(topic, grp);
    end if;
    if w.standby then
        perform weir.check_primary();
    end if;
    settled := w.bound;
    if w.pending <= settled then
        w.pending := null; -- another pair was proven before it, and reaches further
    end if;
    expired := coalesce(w.next_expiry <= now_at, false);
    due := coalesce(w.next_due <= now_at, false);

    if w.claimed + max_messages >= settled then
        drawn := case when own_transaction then coalesce(pg_sequence_last_value(w.sequence), 0) else weir.drawn(w.topic_id) end;
        if drawn < greatest(w.reached, 1) then
            perform weir.check_sequence(w.topic_id, greatest(w.reached, 1), weir.drawn(w.topic_id));
        end if;
        look := w.pending is not null and w.overdue and weir.may_look();
        if drawn > settled and (w.pending is null or look) then
            head := case when own_transaction then drawn else weir.head(w.topic_id, settled) end;
        end if;
    end if;

    if head is null and acks is null and not expired and not due and w.claimed >= settled then
        if w.pending > w.claimed then
            return query select 'waiting', null::bigint, settled, w.pending, null::int;
        end if;
        if w.next_expiry is not null or w.next_due is not null then
            return query select 'later', null::bigint, null::bigint,
                ceil(extract(epoch from least(w.next_expiry, w.next_due) - now_at) * 1000)::bigint, null::int;
        end if;
        return;
    end if;

    if own_transaction then
        perform set_config('synchronous_commit', 'off', true);
    end if;
    if head is not null then
        perform weir.check_sequence(w.topic_id, settled, drawn);
        settled := weir.settle(w.topic_id, head, w.no_xid, look or not w.no_xid and weir.may_look());
        if exists (
            select from weir.segment as s where s.topic_id = w.topic_id having max(s.high) - drawn < w.segment_size
        ) then
            perform weir.extend_log(w.topic_id, drawn, false);
        end if;
    end if;

    if acks is not null then
        return query
        select 'lost', a.id, null::bigint, null::bigint, null::int
        from unnest(acks) as a (id)
        where a.id not in (select k.id from weir.ack_many(acks, consumer) as k (id));
    end if;

    if expired and max_messages > 0 then
        select l.* into taken from weir.take_over(w.group_id, w.topic_id, w.max_attempts, w.split_after, consumer, lease) as l;
        if taken.id is not null then
            return query select 'takeover', taken.id, taken.low, taken.high, taken.attempt;
            return;
        end if;
        due := true;
    end if;

    if due and max_messages > 0 then
        for taken in
            select d.* from weir.claim_deliveries(w.group_id, w.max_attempts, consumer, max_messages, lease, max_bytes) as d
        loop
            max_messages := max_messages - 1;
            max_bytes := max_bytes - taken.bytes;
            return query select 'retry', taken.lease_id, taken.message_id - 1, taken.message_id, taken.attempt;
        end loop;
    end if;

    if w.claimed < settled and max_messages > 0 and max_bytes > 0 then
        select l.* into taken
        from weir.claim_range(w.group_id, w.topic_id, w.format, settled, consumer, max_messages, lease, max_bytes) as l;
        if taken.id is not null then
            return query select 'fresh', taken.id, taken.low, taken.high, 1;
            return;
        end if;
    end if;

    if head > settled then
        return query select 'waiting', null::bigint, settled, head, null::int;
    end if;
end
$$;
create or replace function weir.position(topic_id int, target jsonb, field text) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    settled bigint := weir.settled_head(topic_id);
    at_id bigint;
    at_time timestamptz;
    part record;
    probe_id bigint;
    probe_time timestamptz;
    below bigint;
    above bigint;
begin
    if target = '"beginning"' then
        return coalesce((
            select min(s.low) from weir.segment as s where s.topic_id = position.topic_id
        ) - 1, 0);
    elsif target = '"head"' then
        return settled;
    elsif jsonb_typeof(target) = 'object' and target ? 'id' and target ->> 'id' ~ '^[0-9]{1,18}$' then
        at_id := (target ->> 'id')::bigint - 1;
        for turn in 1..50 loop
            exit when at_id <= settled or at_id > weir.drawn(topic_id) or not weir.may_look();
            perform pg_sleep(0.02);
            settled := weir.settled_head(topic_id);
        end loop;
        if at_id not between 0 and settled then
            raise exception '% is id %, it must be from 1 to the settled head + 1, %', field, at_id + 1, settled + 1
                using errcode = 'WE003', hint = 'Use "head" to wait for what comes next.';
        end if;
        return at_id;
    elsif jsonb_typeof(target) = 'object' and jsonb_typeof(target -> 'time') = 'string' then
        begin
            at_time := (target ->> 'time')::timestamptz;
        exception
            when invalid_datetime_format or datetime_field_overflow or invalid_parameter_value then
                raise exception '% has the time %, which cannot be read', field, target -> 'time'
                    using errcode = 'WE003', hint = 'Write it as "2026-01-31T12:00:00Z".';
        end;
        for part in
            select s.number, s.low, s.high
            from weir.segment as s
            where s.topic_id = position.topic_id and s.low <= settled
            order by s.high
        loop
            execute format('select id, produced_at from weir.log_%s_%s order by id desc limit 1', topic_id, part.number) into probe_id, probe_time;
            continue when probe_id is null or probe_time < at_time;
            below := part.low - 1;
            above := probe_id;
            while above > below + 1 loop
                execute format('select id, produced_at from weir.log_%s_%s where id > $1 and id < $2 order by id limit 1', topic_id, part.number)
                into probe_id, probe_time using (below + above) / 2, above;
                if probe_id is null then
                    execute format('select id, produced_at from weir.log_%s_%s where id > $1 and id <= $2 order by id desc limit 1', topic_id, part.number)
                    into probe_id, probe_time using below, (below + above) / 2;
                    exit when probe_id is null;
                end if;
                if probe_time < at_time then
                    below := probe_id;
                else
                    above := probe_id;
                end if;
            end loop;
            return least(above - 1, settled);
        end loop;
        return settled;
    end if;
    raise exception '% is %, which is no position', field, coalesce(target::text, 'null')
        using errcode = 'WE003', hint = 'Use "beginning", "head", {"id": 42} or {"time": "2026-01-31T12:00:00Z"}.';
end
$$;

create or replace function weir.settled_head(topic_id int) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    f record;
    look boolean;
    visible bigint;
begin
    select max(r.bound) as bound, max(r.pending) as pending, bool_and(r.overdue) filter (where r.pending is not null) as overdue,
        pg_current_xact_id_if_assigned() is null as no_xid
    into f
    from weir.fence_rows as r
    where r.topic_id = settled_head.topic_id;
    if f.pending <= f.bound then
        f.pending := null;
    end if;
    look := f.pending is not null and f.overdue and weir.may_look();
    if (f.pending is null or look) and not pg_is_in_recovery() and current_setting('transaction_read_only') = 'off' then
        visible := weir.head(topic_id, f.bound);
        if visible is not null then
            return weir.settle(topic_id, visible, f.no_xid, look or not f.no_xid and weir.may_look());
        end if;
    end if;
    return f.bound;
end
$$;

create or replace function weir.may_look() returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$ select current_setting('transaction_isolation') in ('read committed', 'read uncommitted') $$;
create or replace function weir.produce(topic text, payload json, key text default null, headers jsonb default null)
returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    into_topic weir.topic := weir.producing_to(topic, false);
    new_id bigint;
begin
    execute format('insert into weir.log_%s (key, headers, payload) values ($1, $2, $3%s) returning id',
        into_topic.id, case into_topic.format when 'jsonb' then '::jsonb' end)
    into new_id using key, headers, payload;
    perform weir.after_produce(into_topic, new_id, new_id);
    return new_id;
end
$$;

create or replace function weir.produce_bytes(topic text, payload bytea, key text default null, headers jsonb default null)
returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    into_topic weir.topic := weir.producing_to(topic, true);
    new_id bigint;
begin
    execute format('insert into weir.log_%s (key, headers, payload) values ($1, $2, $3) returning id', into_topic.id)
    into new_id using key, headers, payload;
    perform weir.after_produce(into_topic, new_id, new_id);
    return new_id;
end
$$;

create or replace function weir.producing_to(topic text, bytes boolean) returns weir.topic
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    into_topic weir.topic;
    reached bigint;
    drawn bigint;
begin
    perform weir.check_primary();
    into_topic := weir.topic_named(topic);
    if (into_topic.format = 'bytes') <> bytes then
        raise exception 'topic % has format %', quote_literal(topic), into_topic.format
            using errcode = 'WE005',
                  hint = format('Use weir.produce%s() or weir.produce_many%1$s() for it.', case when not bytes then '_bytes' end);
    end if;
    select max(r.reached) into reached from weir.fence_rows as r where r.topic_id = into_topic.id;
    drawn := coalesce(pg_sequence_last_value(into_topic.sequence), 0);
    if drawn = 0 then
        execute format('select greatest($1, max(l.id)) from weir.log_%s as l', into_topic.id) into reached using reached;
    end if;
    if drawn < reached then
        perform weir.check_sequence(into_topic.id, reached, drawn);
    end if;
    return into_topic;
end
$$;

create or replace function weir.after_produce(into_topic weir.topic, first_id bigint, last_id bigint) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    settled bigint;
    room bigint;
begin
    select max(r.bound) into settled from weir.fence_rows as r where r.topic_id = into_topic.id;
    if first_id <= settled then
        select max(case when pg_current_xact_id() = any (f.holders) then f.settled else r.bound end)
        into settled
        from weir.fence as f
        join weir.fence_rows as r on r.topic_id = f.topic_id and r.slot = f.slot
        where f.topic_id = into_topic.id;
        if first_id <= settled then
            perform weir.check_sequence(into_topic.id, settled, first_id - 1);
        end if;
    end if;
    select s.high - last_id into room from weir.segment as s where s.topic_id = into_topic.id order by s.high desc limit 1;
    if room < into_topic.segment_size then
        perform weir.extend_log(into_topic.id, last_id, false);
    end if;
end
$$;
create or replace function weir.produce_many(topic text, payloads json[], keys text[] default null, headers jsonb[] default null)
returns setof bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    into_topic weir.topic := weir.producing_to(topic, false);
    ids bigint[];
begin
    execute weir.produce_many_sql(into_topic, cardinality(payloads), cardinality(keys), cardinality(headers))
    into ids using payloads, keys, headers;
    perform weir.after_produce(into_topic, ids[1], ids[cardinality(ids)]);
    return query select i from unnest(ids) as i;
end
$$;

create or replace function weir.produce_many_bytes(topic text, payloads bytea[], keys text[] default null, headers jsonb[] default null)
returns setof bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    into_topic weir.topic := weir.producing_to(topic, true);
    ids bigint[];
begin
    execute weir.produce_many_sql(into_topic, cardinality(payloads), cardinality(keys), cardinality(headers))
    into ids using payloads, keys, headers;
    perform weir.after_produce(into_topic, ids[1], ids[cardinality(ids)]);
    return query select i from unnest(ids) as i;
end
$$;

create or replace function weir.produce_many_sql(into_topic weir.topic, payloads int, keys int, headers int) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if keys <> payloads or headers <> payloads then
        raise exception '% payloads, but % keys and % headers', payloads, coalesce(keys::text, 'no'), coalesce(headers::text, 'no')
            using errcode = 'WE003', hint = 'Give one key and one headers object for each payload, or null for none at all.';
    end if;
    if payloads > into_topic.segment_size / 4 then
        perform weir.make_room(into_topic.name, payloads);
    end if;
    return format(
        'with stored as (
            insert into weir.log_%s (key, headers, payload)
            select key, headers, payload%s
            from unnest($1, $2, $3) with ordinality as u (payload, key, headers, position)
            order by position
            returning id
        )
        select array_agg(id order by id) from stored',
        into_topic.id, case into_topic.format when 'jsonb' then '::jsonb' end);
end
$$;

create or replace function weir.make_room(topic text, messages bigint) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    into_topic weir.topic := weir.topic_named(topic);
    reached bigint;
    drawn bigint;
    room bigint;
begin
    perform weir.check_range('messages', messages, 1, 1000000000);
    select max(r.reached) into reached from weir.fence_rows as r where r.topic_id = into_topic.id;
    drawn := weir.drawn(into_topic.id);
    if drawn < reached then
        perform weir.check_sequence(into_topic.id, reached, weir.drawn(into_topic.id));
    end if;
    select s.high - drawn into room from weir.segment as s where s.topic_id = into_topic.id order by s.high desc limit 1;
    if room < messages + into_topic.segment_size then
        perform weir.extend_log(into_topic.id, drawn + messages, room < messages + 1000);
    end if;
end
$$;
create or replace function weir.produced_after(topic_id int, id bigint) returns timestamptz
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    part record;
    at_time timestamptz;
begin
    for part in
        select s.number
        from weir.segment as s
        where s.topic_id = produced_after.topic_id and s.high > produced_after.id + 1
        order by s.high
    loop
        execute format('select produced_at from weir.log_%s_%s where id > $1 order by id limit 1', topic_id, part.number)
        into at_time using produced_after.id;
        exit when at_time is not null;
    end loop;
    return at_time;
end
$$;
create or replace function weir.read(topic text, after bigint, max_messages int default 100)
returns table (id bigint, key text, headers jsonb, payload json, data bytea, produced_at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
    from_topic weir.topic := weir.topic_named(topic);
    settled bigint;
    part record;
    given int;
begin
    perform weir.check_range('after', after, 0, 9223372036854775807);
    perform weir.check_range('max_messages', max_messages, 1, 10000);
    select max(r.bound) into settled from weir.fence_rows as r where r.topic_id = from_topic.id;
    if after >= settled then
        settled := weir.settled_head(from_topic.id);
    end if;
    for part in
        select s.number
        from weir.segment as s
        where s.topic_id = from_topic.id and s.high > after + 1 and s.low <= settled
        order by s.high
    loop
        return query execute format(
            'select id, key, headers, %s, produced_at from weir.log_%s_%s where id > $1 and id <= $2 order by id limit $3',
            case from_topic.format when 'bytes' then 'null::json, payload' when 'jsonb' then 'payload::json, null::bytea' else 'payload, null::bytea' end,
            from_topic.id, part.number)
        using after, settled, max_messages;
        get diagnostics given = row_count;
        max_messages := max_messages - given;
        exit when max_messages = 0;
    end loop;
end
$$;
create or replace function weir.release(lease_id bigint, consumer text, done bigint[] default null) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update weir.lease as l
    set expires_at = clock_timestamp(),
        attempt = l.attempt - 1,
        done = nullif(coalesce(l.done, '{}') || coalesce(release.done, '{}'), '{}')
    where l.id = release.lease_id and l.consumer = release.consumer and l.expires_at > clock_timestamp();
    if found then
        return true;
    end if;
    update weir.delivery as d
    set state = 'ready', due_at = clock_timestamp(), attempt = d.attempt - 1, lease_id = null, consumer = null
    where d.lease_id = release.lease_id and d.consumer = release.consumer and d.due_at > clock_timestamp();
    return found;
end
$$;
create or replace function weir.seek(topic text, grp text, target jsonb) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    moved weir.consumer_group := weir.group_named(topic, grp);
    was bigint;
    new_position bigint;
begin
    perform weir.check_primary();
    new_position := weir.position(moved.topic_id, target, 'target');
    delete from weir.lease as l where l.group_id = moved.id;
    select c.claimed into was from weir.cursor as c where c.group_id = moved.id for no key update;
    delete from weir.lease as l where l.group_id = moved.id;
    update weir.cursor as c set claimed = new_position where c.group_id = moved.id;
    return was;
end
$$;
create or replace function weir.settle(topic_id int, head bigint, own_xid boolean, look boolean) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
declare
    seen xid8[];
    chosen int;
    proven bigint;
    settled bigint;
    later bigint;
begin
    if settle.look then
        with l as materialized (
            select locktype, database, relation, transactionid, virtualtransaction, mode
            from pg_locks
            where granted
        ),
        own as (
            select x.virtualtransaction, min(n.xid - case when d.back > 2147483648 then d.back - 4294967296 else d.back end) as xid
            from l as x
            cross join (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint as xid) as n
            cross join lateral (select (n.xid - x.transactionid::text::bigint) & 4294967295 as back) as d
            where x.locktype = 'transactionid' and x.mode = 'ExclusiveLock'
            group by x.virtualtransaction
        )
        select coalesce(array_agg(distinct o.xid::text::xid8), '{}')
        into seen
        from l as s
        join own as o on o.virtualtransaction = s.virtualtransaction
        where s.locktype = 'relation'
          and s.mode = 'RowExclusiveLock'
          and s.database = (select d.oid from pg_database as d where d.datname = current_database())
          and s.relation = format('weir.log_%s_id', settle.topic_id)::regclass
          and o.xid is distinct from pg_current_xact_id_if_assigned()::text::bigint;
    end if;

    select max(r.bound) into proven from weir.fence_rows as r where r.topic_id = settle.topic_id;
    select f.slot
    into chosen
    from weir.fence as f
    join weir.fence_rows as r on r.topic_id = f.topic_id and r.slot = f.slot
    where f.topic_id = settle.topic_id
      and (r.pending is null or r.pending <= proven)
    order by f.slot
    limit 1
    for update of f skip locked;

    if chosen is null then
        insert into weir.fence (topic_id, slot, settled, head)
        values (settle.topic_id, (random() * 2147483646)::int + 1, coalesce(proven, 0), 0)
        returning slot into chosen;
    end if;

    update weir.fence as f
    set settled = r.bound,
        head = settle.head,
        xid = case when settle.own_xid then pg_current_xact_id() end,
        holders = seen,
        boot = case when seen is not null then pg_postmaster_start_time() + hashtext(current_database()) * interval '1 us' end,
        observed_at = clock_timestamp()
    from weir.fence_rows as r
    where f.topic_id = settle.topic_id and f.slot = chosen
      and r.topic_id = f.topic_id and r.slot = f.slot;

    if not settle.own_xid and not settle.look then
        begin
            update weir.fence as f
            set xid = null
            where f.topic_id = settle.topic_id and f.slot = chosen
            returning f.xmin::text::bigint into later;
            update weir.fence as f
            set xid = (n.xid - case when d.back > 2147483648 then d.back - 4294967296 else d.back end)::text::xid8
            from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint as xid) as n
            cross join lateral (select (n.xid - later) & 4294967295 as back) as d
            where f.topic_id = settle.topic_id and f.slot = chosen;
        exception
            when case_not_found then raise;
        end;
    end if;

    select max(r.bound) into settled from weir.fence_rows as r where r.topic_id = settle.topic_id;
    return settled;
end
$$;
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

create or replace function weir.payload_column(topic_id int) returns text
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select case t.format when 'bytes' then 'data' else 'payload' end from weir.topic as t where t.id = topic_id
$$;

create or replace function weir.error_entry(attempt int, error text) returns jsonb
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    select jsonb_build_object('attempt', attempt, 'at', clock_timestamp(), 'error', left(error, 4000))
$$;
create or replace function weir.topic_info(topic text) returns table (id int, format text, log text)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    found_topic weir.topic := weir.topic_named(topic);
begin
    perform weir.check_sequence(found_topic.id, 0, 0);
    return query select found_topic.id, found_topic.format, format('weir.log_%s', found_topic.id);
end
$$;
create or replace function weir.topic_named(topic text) returns weir.topic
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    found_topic weir.topic;
begin
    select t.* into found_topic from weir.topic as t where t.name = topic_named.topic;
    if found_topic.id is null then
        raise exception 'topic % does not exist', coalesce(quote_literal(topic), 'null')
            using errcode = 'WE001', hint = 'Create it with weir.create_topic(), or correct the name: weir.topics lists them.';
    end if;
    return found_topic;
end
$$;
create or replace function weir.version() returns table (version int, compatible int, functions text)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$ select m.version, m.compatible, m.functions from weir.meta as m $$;
create or replace view weir.fence_rows as
select
    f.topic_id,
    f.slot,
    f.observed_at,
    case when f.proven then greatest(f.head, f.settled) else f.settled end as bound,
    case
        when not f.proven and not f.foreign_xid and (f.has_xid or f.seen_here) and f.head > f.settled then f.head
    end as pending,
    not f.proven and f.seen_here as looked,
    not f.proven and not f.seen_here and clock_timestamp() - f.observed_at > interval '100 ms' as overdue,
    greatest(f.head, f.settled) as reached
from (
    select
        p.topic_id, p.slot, p.observed_at, p.settled, p.head,
        p.xid is not null as has_xid,
        p.holders is not null and p.boot = pg_postmaster_start_time() + hashtext(current_database()) * interval '1 us' as seen_here,
        case
            when p.xid <= pg_snapshot_xmin(pg_current_snapshot()) then true
            when p.holders is not null and p.boot = pg_postmaster_start_time() + hashtext(current_database()) * interval '1 us'
            then weir.finished(p.holders)
            else false
        end as proven,
        case
            when p.xid >= pg_snapshot_xmax(pg_current_snapshot()) then p.xid is distinct from pg_current_xact_id_if_assigned()
            else false
        end as foreign_xid
    from weir.fence as p
) as f;

create or replace view weir.topics as
select
    t.id,
    t.name as topic,
    t.format,
    format('weir.log_%s', t.id) as log,
    format('weir.log_%s_id', t.id) as sequence,
    coalesce(weir.head(t.id, f.settled), f.settled) as head,
    f.settled,
    t.segment_size,
    (select count(*) from weir.segment as s where s.topic_id = t.id) as segments,
    (select count(*) from weir.consumer_group as g where g.topic_id = t.id) as groups,
    t.created_at
from weir.topic as t
cross join lateral (select max(r.bound) as settled from weir.fence_rows as r where r.topic_id = t.id) as f;

create or replace view weir.groups as
select
    t.topic,
    g.name as grp,
    g.mode,
    t.head,
    t.settled,
    c.claimed,
    p.committed,
    greatest(t.head - p.committed, 0) as lag,
    case
        when t.head > p.committed
        then coalesce(extract(epoch from clock_timestamp() - weir.produced_after(t.id, p.committed)), 0)::double precision
        else 0
    end as lag_seconds,
    p.leases,
    d.retrying,
    d.dead,
    g.max_attempts,
    g.retry_delay,
    g.retry_max,
    g.split_after,
    g.created_at,
    g.id
from weir.consumer_group as g
join weir.topics as t on t.id = g.topic_id
join weir.cursor as c on c.group_id = g.id
cross join lateral (
    select count(*) as leases, least(min(l.low), c.claimed) as committed from weir.lease as l where l.group_id = g.id
) as p
cross join lateral (
    select
        count(*) filter (where d.state <> 'dead') as retrying,
        count(*) filter (where d.state = 'dead') as dead
    from weir.delivery as d
    where d.group_id = g.id
) as d;

create or replace view weir.leases as
select l.id as lease_id, t.name as topic, g.name as grp, l.low, l.high, l.consumer, l.attempt, l.claimed_at, l.expires_at
from weir.lease as l
join weir.consumer_group as g on g.id = l.group_id
join weir.topic as t on t.id = g.topic_id;

create or replace view weir.deliveries as
select
    t.name as topic, g.name as grp, d.message_id, d.state, d.due_at, d.attempt, d.lease_id, d.consumer, d.key, d.headers,
    d.payload, d.data, d.produced_at, d.errors, d.created_at
from weir.delivery as d
join weir.consumer_group as g on g.id = d.group_id
join weir.topic as t on t.id = g.topic_id;

create or replace view weir.dead_letters as
select
    d.topic, d.grp, d.message_id, d.attempt, d.errors -> -1 ->> 'error' as error, (d.errors -> -1 ->> 'at')::timestamptz as died_at,
    d.key, d.headers, d.payload, d.data, d.produced_at, d.errors
from weir.deliveries as d
where d.state = 'dead';

create or replace view weir.blockers as
with locks as materialized (
    select l.locktype, l.database, l.relation, l.transactionid, l.pid, l.virtualtransaction, l.mode
    from pg_locks as l
    where l.granted
)
select
    v.topic,
    h.pid,
    x.gid,
    clock_timestamp() - coalesce(a.xact_start, x.prepared) as age,
    case when h.pid is null then 'prepared' else a.state end as state,
    a.application_name as application,
    a.query,
    v.head - v.settled as waiting
from locks as h
join weir.topic as t on t.sequence = h.relation
join weir.topics as v on v.id = t.id
left join pg_stat_activity as a on a.pid = h.pid
left join pg_prepared_xacts as x
    on h.pid is null and exists (
        select from locks as o
        where o.virtualtransaction = h.virtualtransaction and o.locktype = 'transactionid' and o.transactionid = x.transaction
    )
where h.locktype = 'relation' and h.mode = 'RowExclusiveLock'
  and h.database = (select d.oid from pg_database as d where d.datname = current_database())
  and h.pid is distinct from pg_backend_pid() and v.head > v.settled;
revoke all on all functions in schema weir from public;
revoke all on all tables in schema weir from public;
revoke all on all sequences in schema weir from public;
revoke all on schema weir from public;
insert into weir.meta (version, compatible, functions) values (1, 1, 'version 1');
