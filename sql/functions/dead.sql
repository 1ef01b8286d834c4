-- weir.redrive(topic, grp, message_id, filter, to_topic, max_messages): gives dead messages another life. Returns how many.
--
-- message_id    one of them; null for all that the filter leaves
-- filter        which of them, as for weir.dead_letters_matching; null for all
-- to_topic      null: the group itself handles them again: due at once, attempts counted from none, their errors kept. Else each
--               is produced to that topic as a new message, with its key, headers, payload, priority and timeout, and is a
--               dead letter no more. Its headers say where it comes from: weir-dead-topic, weir-dead-group,
--               weir-dead-id, weir-dead-attempts, weir-dead-error (the last one)
-- max_messages  at most so many, those with the lowest ids, 1 to 1,000,000; null for all. Call it again until it returns 0
--
-- In an ordered group they take their place in their key again: what is there of later messages waits for them. A message that the
-- group will come by anyway, because it was moved back, is only struck off the dead letters.
--
-- Errors: WE001 (also for to_topic), WE002, WE003, WE005 (one does not fit to_topic, which it names), WE006. Then nothing is
-- changed. Locks: the rows; of an ordered group before them the rows and leases of their shards. Index: delivery_dead.
create or replace function weir.redrive(
    topic text, grp text, message_id bigint default null, filter jsonb default null, to_topic text default null,
    max_messages int default null
)
returns bigint
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$ select p.messages from weir.redrive_part(topic, grp, message_id, filter, to_topic, 0, max_messages) as p $$;

-- weir.purge(topic, grp, message_id, filter, max_messages): removes dead messages for good; the log keeps its copy. Arguments and
-- result as for weir.redrive. Errors: WE001, WE002, WE003, WE006. Locks: the rows.
create or replace function weir.purge(
    topic text, grp text, message_id bigint default null, filter jsonb default null, max_messages int default null
)
returns bigint
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$ select p.messages from weir.purge_part(topic, grp, message_id, filter, 0, max_messages) as p $$;

-- weir.dead_letters_matching(topic, grp, filter, after, max_messages): dead letters of a group, in id order.
--
-- filter        a JSON object; null and {} for all. What it has must all hold:
--               ids                              a list of ids
--               key, key_prefix                  the key is this, begins so
--               headers                          the headers contain these, a JSON object
--               error                            a part of the last error's text
--               produced_after, produced_before  produced at or after, before a time such as "2026-01-31T12:00:00Z"
--               died_after, died_before          the same for the last attempt's failure
--               min_attempts                     so many attempts or more
-- after         only those with a higher id, 0 for all
-- max_messages  1 to 10,000
--
-- Errors: WE001, WE002, WE003 (an unknown name in filter, or a value that it cannot have). Index: delivery_dead.
create or replace function weir.dead_letters_matching(
    topic text, grp text, filter jsonb default null, after bigint default 0, max_messages int default 100
)
returns table (
    message_id bigint, attempt int, error text, died_at timestamptz, key text, headers jsonb, payload json, data bytea,
    produced_at timestamptz, errors jsonb
)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
    of_group weir.consumer_group := weir.group_named(topic, grp);
    ids bigint[];
begin
    perform weir.check_range('max_messages', max_messages, 1, 10000);
    ids := array(select i from weir.dead_ids(of_group.id, null, filter, after, max_messages) as i);
    return query
    select
        d.message_id, d.attempt, d.errors -> -1 ->> 'error', (d.errors -> -1 ->> 'at')::timestamptz, d.key, d.headers, d.payload,
        d.data, d.produced_at, d.errors
    from unnest(ids) as i (id)
    cross join lateral (
        select d.* from weir.delivery as d where d.group_id = of_group.id and d.message_id = i.id and d.state = 'dead' offset 0
    ) as d
    order by d.message_id;
end
$$;

-- weir.redrive_part(topic, grp, message_id, filter, to_topic, after, max_messages): weir.redrive for those with an id above after. last is
-- where to go on, null when no more are left.
create or replace function weir.redrive_part(
    topic text, grp text, message_id bigint, filter jsonb, to_topic text, after bigint, max_messages int,
    out messages bigint, out last bigint
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    of_group weir.consumer_group := weir.group_named(topic, grp);
    ids bigint[];
    coming bigint[];
    keys text[];
    into_topic weir.topic;
begin
    perform weir.check_primary();
    if to_topic is not null then
        into_topic := weir.topic_named(to_topic);
        perform weir.check_redrive_to(weir.topic_named(topic), into_topic);
    end if;
    select l.ids, l.last into ids, last from weir.lock_dead(of_group, message_id, filter, after, max_messages) as l;

    if to_topic is not null then
        perform weir.produce_dead(of_group.id, topic, grp, ids, into_topic);
        delete from weir.delivery as d where d.group_id = of_group.id and d.message_id = any (ids);
        get diagnostics messages = row_count;
        return;
    end if;

    -- Of a group that was moved back: above its cursor, or claimed since. As a delivery too it would be handed out twice, in an
    -- ordered group perhaps at once.
    select array_agg(d.message_id) into coming
    from weir.delivery as d
    cross join lateral (
        select (of_group.key_prefix is null or starts_with(d.key, of_group.key_prefix))
            and (of_group.header_match is null or d.headers @> of_group.header_match) as fits
    ) as f
    where d.group_id = of_group.id and d.message_id = any (ids)
      and (
          f.fits and d.message_id > (select c.claimed from weir.cursor as c where c.group_id = of_group.id)
          or exists (
              select from weir.lease as l
              where l.group_id = of_group.id and l.low < d.message_id and l.high >= d.message_id
                and d.message_id <> all (coalesce(l.done, '{}'))
                and case when l.ids is null then f.fits else d.message_id = any (l.ids) end
          )
          or d.message_id = any ((
              select r.ids from weir.shard_range as r
              where r.group_id = of_group.id and r.shard = d.shard and r.low < d.message_id
              order by r.low desc
              limit 1
          )::bigint[])
      );
    if coming is not null then
        -- Unless retention or compaction has removed it from the log meanwhile: then this is the last copy.
        execute format('select array_agg(l.id) from weir.log_%s as l where l.id = any ($1)', of_group.topic_id) into coming using coming;
        delete from weir.delivery as d where d.group_id = of_group.id and d.message_id = any (coming);
    end if;
    with alive as (
        update weir.delivery as d
        set state = 'ready', due_at = clock_timestamp(), attempt = 0, suspect = false
        where d.group_id = of_group.id and d.message_id = any (ids)
        returning d.key, d.shard
    )
    select array_agg(distinct a.key) filter (where a.shard is not null and a.key is not null), count(*) into keys, messages from alive as a;
    perform weir.order_keys(of_group.id, keys);
    messages := messages + coalesce(cardinality(coming), 0);
end
$$;

-- weir.purge_part(topic, grp, message_id, filter, after, max_messages): weir.purge for those with an id above after; last as for
-- weir.redrive_part.
create or replace function weir.purge_part(
    topic text, grp text, message_id bigint, filter jsonb, after bigint, max_messages int, out messages bigint, out last bigint
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    of_group weir.consumer_group := weir.group_named(topic, grp);
    ids bigint[];
begin
    perform weir.check_primary();
    select l.ids, l.last into ids, last from weir.lock_dead(of_group, message_id, filter, after, max_messages) as l;
    delete from weir.delivery as d where d.group_id = of_group.id and d.message_id = any (ids);
    get diagnostics messages = row_count;
end
$$;

-- weir.lock_dead(of_group, message_id, filter, after, max_messages): the next dead letters of a group, locked in the order of their ids.
-- last is where to go on, null when no more are left.
--
-- In an ordered group first the rows and then the leases of their shards: whoever changes what waits for what in a key has one of
-- them. Without that, an acknowledgement that does not see the redriven message yet, and a redrive that still sees the
-- acknowledged one, would leave the first parked behind nothing.
create or replace function weir.lock_dead(
    of_group weir.consumer_group, message_id bigint, filter jsonb, after bigint, max_messages int,
    out ids bigint[], out last bigint
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
    candidates bigint[];
    shards int[];
begin
    if max_messages is not null then
        perform weir.check_range('max_messages', max_messages, 1, 1000000);
    end if;
    last := after;
    loop
        candidates := array(select i from weir.dead_ids(of_group.id, message_id, filter, last, max_messages) as i);
        last := case when cardinality(candidates) >= max_messages then candidates[cardinality(candidates)] end;
        if of_group.mode = 'ordered' then
            shards := array(
                select distinct d.shard from weir.delivery as d where d.group_id = of_group.id and d.message_id = any (candidates)
            );
            perform from weir.shard as s where s.group_id = of_group.id and s.number = any (shards) order by s.number for no key update;
            perform from weir.lease as l where l.group_id = of_group.id and l.shard = any (shards) order by l.shard for update;
        end if;
        -- One by one: sorted by id as a set, they would be sought among all dead letters.
        ids := array(
            select d.message_id
            from unnest(candidates) as i (id)
            cross join lateral (
                select d.message_id from weir.delivery as d
                where d.group_id = of_group.id and d.message_id = i.id and d.state = 'dead'
                for update
            ) as d
        );
        -- Another call may have been ahead with all of these, and not with what follows.
        exit when cardinality(ids) > 0 or last is null;
    end loop;
end
$$;

-- weir.dead_ids(group_id, message_id, filter, after, max_messages): ids of the dead letters of a group that are above after and match, in
-- order. message_id, max_messages: null for any.
create or replace function weir.dead_ids(group_id int, message_id bigint, filter jsonb, after bigint, max_messages int) returns setof bigint
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
    -- A list of ids is probed one by one: the index that gives the order would be read as a whole.
    return query execute
        'select d.message_id from '
        || case when filter ->> 'ids' is not null then
            '(select distinct i::bigint as id from jsonb_array_elements($2 -> ''ids'') as i) as i
             cross join lateral (
                 select x.* from weir.delivery as x where x.group_id = $1 and x.message_id = i.id offset 0
             ) as d'
            else 'weir.delivery as d' end
        || ' where d.group_id = $1 and d.state = ''dead'' and d.message_id > $3'
        || case when message_id is not null then ' and d.message_id = $5' else '' end
        || weir.dead_filter_sql(filter)
        || ' order by d.message_id limit $4'
    using group_id, filter, coalesce(after, 0), max_messages, message_id;
end
$$;

-- weir.dead_filter_sql(filter): the condition that a filter of dead letters, but for its ids, puts on a query of weir.delivery as d, in
-- which the filter is $2. Errors: WE003.
create or replace function weir.dead_filter_sql(filter jsonb) returns text
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    known constant text[] := array[
        'ids', 'key', 'key_prefix', 'headers', 'error', 'produced_after', 'produced_before', 'died_after', 'died_before', 'min_attempts'
    ];
    unknown text;
    name text;
    value jsonb;
    must text;
    condition text := '';
begin
    if filter is null then
        return '';
    end if;
    if jsonb_typeof(filter) <> 'object' then
        raise exception 'filter is %, it must be a JSON object', left(filter::text, 100)
            using errcode = 'WE003', hint = format('It can have: %s.', array_to_string(known, ', '));
    end if;
    select string_agg(quote_literal(k), ', ' order by k) into unknown from jsonb_object_keys(filter) as k where k <> all (known);
    if unknown is not null then
        raise exception 'filter has the unknown %', unknown
            using errcode = 'WE003', hint = format('It can have: %s.', array_to_string(known, ', '));
    end if;

    foreach name in array known loop
        value := nullif(filter -> name, 'null');
        continue when value is null;
        must := null;
        if name = 'ids' then
            if jsonb_typeof(value) <> 'array' or jsonb_path_exists(value, '$[*] ? (@.type() != "number" || @ < 1 || @ > 9e18 || @.floor() != @)') then
                must := 'a list of ids, whole numbers of at least 1';
            end if;
        elsif name = 'headers' then
            if jsonb_typeof(value) <> 'object' then
                must := 'a JSON object';
            end if;
            condition := condition || ' and d.headers @> ($2 -> ''headers'')';
        elsif name = 'min_attempts' then
            if jsonb_typeof(value) <> 'number' or value::text !~ '^[0-9]{1,9}$' then
                must := 'a whole number, at least 0';
            end if;
            condition := condition || ' and d.attempt >= (select ($2 ->> ''min_attempts'')::int)';
        elsif jsonb_typeof(value) <> 'string' then
            must := 'a text';
        elsif name in ('key', 'key_prefix', 'error') then
            condition := condition || case name
                when 'key' then ' and d.key = $2 ->> ''key'''
                when 'key_prefix' then ' and starts_with(d.key, $2 ->> ''key_prefix'')'
                else ' and strpos(d.errors -> -1 ->> ''error'', $2 ->> ''error'') > 0'
            end;
        else
            begin
                perform (value #>> '{}')::timestamptz;
            exception
                when invalid_datetime_format or datetime_field_overflow or invalid_parameter_value then
                    must := 'a time such as "2026-01-31T12:00:00Z"';
            end;
            condition := condition || format(' and %s %s (select ($2 ->> %L)::timestamptz)',
                case when name like 'died%' then '(d.errors -> -1 ->> ''at'')::timestamptz' else 'd.produced_at' end,
                case when name like '%after' then '>=' else '<' end, name);
        end if;
        if must is not null then
            raise exception 'filter has % for %, it must be %', left(value::text, 100), name, must
                using errcode = 'WE003', hint = format('Leave %s out where it does not matter.', name);
        end if;
    end loop;
    return condition;
end
$$;

-- weir.check_redrive_to(from_topic, into_topic): refuses, with WE005, a topic whose format cannot hold the payloads of the other one.
create or replace function weir.check_redrive_to(from_topic weir.topic, into_topic weir.topic) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if (from_topic.format = 'bytes') <> (into_topic.format = 'bytes') then
        raise exception 'dead letters of topic %, which has format %, do not fit topic %, which has format %',
            quote_literal(from_topic.name), from_topic.format, quote_literal(into_topic.name), into_topic.format
            using errcode = 'WE005',
                  hint = format('Redrive them to a topic of format %s.',
                      case from_topic.format when 'bytes' then 'bytes' else 'json or jsonb' end);
    end if;
end
$$;

-- weir.produce_dead(group_id, topic, grp, ids, into_topic): produces these dead letters of a group, which are locked, to a topic.
create or replace function weir.produce_dead(group_id int, topic text, grp text, ids bigint[], into_topic weir.topic) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    dead record;
    why text;
begin
    for dead in
        select
            d.message_id, d.key, d.payload, d.data, nullif(d.priority, 0)::int as priority, d.timeout,
            coalesce(d.headers, '{}') || jsonb_build_object(
                'weir-dead-topic', topic,
                'weir-dead-group', grp,
                'weir-dead-id', d.message_id::text,
                'weir-dead-attempts', d.attempt::text,
                'weir-dead-error', coalesce(d.errors -> -1 ->> 'error', '')
            ) as headers
        from weir.delivery as d
        where d.group_id = produce_dead.group_id and d.message_id = any (ids)
        order by d.message_id
    loop
        if into_topic.format = 'bytes' then
            perform weir.produce_bytes(
                topic => into_topic.name, payload => dead.data, key => dead.key, headers => dead.headers,
                priority => dead.priority, timeout => dead.timeout
            );
        else
            perform weir.produce(
                topic => into_topic.name, payload => dead.payload, key => dead.key, headers => dead.headers,
                priority => dead.priority, timeout => dead.timeout
            );
        end if;
    end loop;
exception
    when data_exception or integrity_constraint_violation or sqlstate 'WE003' then
        get stacked diagnostics why = pg_exception_detail;
        raise exception 'dead letter % does not fit topic %: %', dead.message_id, quote_literal(into_topic.name), sqlerrm
            using errcode = 'WE005', detail = why, hint = 'Redrive it to a topic that takes it, to its own group, or purge it.';
end
$$;
