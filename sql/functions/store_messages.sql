-- weir.store_messages(topic, near, payloads, keys, headers, deliver_at, delays, priorities, timeouts, idempotency_keys, single): stores
-- messages. All that produces comes here, but weir.produce without options, and clients that COPY.
--
-- near      the end of the last segment is, as weir.producing_to has found
-- payloads  json[] or bytea[], as that has found to fit the topic
-- keys to idempotency_keys  null, or arrays of the same length, with nulls where a message has none
-- single    errors name the arguments of weir.produce
--
-- Returns an id for each payload, in their order: that of a duplicate is the first one's, negated.
-- Errors: WE003, WE007. Locks: idempotency keys, in the order of the keys; then as an insert.
create or replace function weir.store_messages(
    into_topic weir.topic, near boolean, payloads anyarray, keys text[], headers jsonb[], deliver_at timestamptz[], delays interval[],
    priorities int[], timeouts interval[], idempotency_keys text[], single boolean
)
returns bigint[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    messages int := cardinality(payloads);
    wrong record;
    store boolean[];
    ids bigint[];
    statement text;
    violated text;
begin
    if messages is null or cardinality(keys) <> messages or cardinality(headers) <> messages or cardinality(deliver_at) <> messages
        or cardinality(delays) <> messages or cardinality(priorities) <> messages or cardinality(timeouts) <> messages
        or cardinality(idempotency_keys) <> messages
    then
        select a.name, a.length into wrong
        from (
            values ('keys', cardinality(keys)), ('headers', cardinality(headers)), ('deliver_at', cardinality(deliver_at)),
                ('delays', cardinality(delays)), ('priorities', cardinality(priorities)), ('timeouts', cardinality(timeouts)),
                ('idempotency_keys', cardinality(idempotency_keys))
        ) as a (name, length)
        where a.length is distinct from messages and (messages is null or a.length is not null)
        limit 1;
        raise exception 'payloads has % entries, % has %', coalesce(messages::text, 'no'), wrong.name, coalesce(wrong.length::text, 'no')
            using errcode = 'WE003', hint = format('Give an entry of %s for each payload, or null for none at all.', wrong.name);
    end if;
    if keys is not null or num_nonnulls(deliver_at, delays, priorities, timeouts, idempotency_keys) > 0 then
        perform weir.check_messages(keys, deliver_at, delays, priorities, timeouts, idempotency_keys, single);
    end if;
    if into_topic.compact and (keys is null or array_position(keys, null) is not null) then
        raise exception 'topic % is compacted: each of its messages needs a key', quote_literal(into_topic.name)
            using errcode = 'WE003', hint = 'The latest message of each key is kept.';
    end if;
    if idempotency_keys is not null then
        -- Which messages are stored depends on it. Whoever waits here for another transaction's key holds no id yet.
        store := weir.reserve_keys(into_topic, idempotency_keys);
        near := weir.make_way(into_topic, messages); -- it may have waited for long
    end if;
    if store is null and num_nonnulls(deliver_at, delays, priorities, timeouts) = 0 then
        statement := format('select weir.log_%s_insert($1, $2, $3)', into_topic.id);
    else
        statement := format(
            'with stored as (
                insert into weir.log_%s (key, headers, payload, deliver_at, priority, timeout)
                select key, headers, payload%s, coalesce(deliver_at, clock_timestamp() + delay), priority, timeout
                from unnest($1, $2, $3, $4, $5, $6, $7, $8) with ordinality
                    as u (payload, key, headers, deliver_at, delay, priority, timeout, store, position)
                where store is not false
                order by position
                returning id
            )
            select array_agg(id order by id) from stored',
            into_topic.id, case into_topic.format when 'jsonb' then '::jsonb' end);
    end if;
    if not near then
        execute statement into ids using payloads, keys, headers, deliver_at, delays, priorities, timeouts, store;
    else
        -- However much room there was, others can have used it up by now.
        loop
            begin
                execute statement into ids using payloads, keys, headers, deliver_at, delays, priorities, timeouts, store;
                exit;
            exception
                when check_violation then
                    get stacked diagnostics violated = constraint_name;
                    if violated <> '' then
                        raise;
                    end if;
                    perform weir.extend_log(into_topic.id, pg_sequence_last_value(into_topic.sequence) + messages);
            end;
        end loop;
    end if;
    if ids is not null then
        perform weir.after_produce(into_topic, ids[1]);
    end if;
    if store is not null then
        ids := weir.resolve_keys(into_topic.id, idempotency_keys, store, ids);
    end if;
    return ids;
end
$$;

-- weir.store_one(topic, near, payload, ...): stores one message that has more than key, headers and payload, as a batch of one.
create or replace function weir.store_one(
    into_topic weir.topic, near boolean, payload anyelement, key text, headers jsonb, deliver_at timestamptz, delay interval, priority int,
    timeout interval, idempotency_key text
)
returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    return abs((weir.store_messages(
        into_topic, near, array[payload], array[key], array[headers], array[deliver_at], array[delay], array[priority],
        array[timeout], case when idempotency_key is not null then array[idempotency_key] end, true
    ))[1]);
end
$$;

-- weir.check_messages(keys, deliver_at, delays, priorities, timeouts, idempotency_keys, single): refuses, with WE003, what no message
-- can have. The error names the first one.
create or replace function weir.check_messages(
    keys text[], deliver_at timestamptz[], delays interval[], priorities int[], timeouts interval[], idempotency_keys text[],
    single boolean
)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    bad record;
    named text;
begin
    select u.* into bad
    from (
        select
            m.*,
            case
                when octet_length(m.key) > 1024 then 'key'
                when num_nonnulls(m.deliver_at, m.delay) = 2 then 'both'
                when not isfinite(m.deliver_at) or m.deliver_at >= '10000-01-01 00:00:00+00' then 'deliver_at'
                when m.delay not between interval '0 s' and interval '3650 days' then 'delay'
                when m.priority not between -10 and 10 then 'priority'
                when m.timeout <= interval '0 s' or m.timeout > interval '7 days' then 'timeout'
                when char_length(m.idempotency_key) not between 1 and 200 then 'idempotency_key'
            end as field
        from unnest(keys, deliver_at, delays, priorities, timeouts, idempotency_keys) with ordinality
            as m (key, deliver_at, delay, priority, timeout, idempotency_key, position)
    ) as u
    where u.field is not null
    order by u.position
    limit 1;
    if bad.field is null then
        return;
    end if;
    named := bad.field;
    if not single then
        named := format(
            '%s[%s]', case bad.field when 'priority' then 'priorities' when 'deliver_at' then bad.field else bad.field || 's' end,
            bad.position);
    end if;
    case bad.field
        when 'key' then
            raise exception '% has % bytes, it must have at most 1024', named, octet_length(bad.key)
                using errcode = 'WE003', hint = 'A key says what a message is about: put what is longer into the payload.';
        when 'both' then
            raise exception 'deliver_at and delay are both given%', case when not single then format(', for message %s', bad.position) end
                using errcode = 'WE003', hint = 'Give one of them, or neither for at once.';
        when 'deliver_at' then
            raise exception '% is %, it must be a time before the year 10000', named, bad.deliver_at
                using errcode = 'WE003', hint = 'A time that is past means at once, as null does.';
        when 'delay' then
            raise exception '% is %, it must be from 0 s to 3650 days', named, bad.delay
                using errcode = 'WE003', hint = 'Give it a length of time within that range, or null for none.';
        when 'priority' then
            raise exception '% is %, it must be from -10 to 10', named, bad.priority
                using errcode = 'WE003', hint = 'Higher ones are handed out first; null is 0.';
        when 'timeout' then
            raise exception '% is %, it must be more than 0 s and at most 7 days', named, bad.timeout
                using errcode = 'WE003', hint = 'Give it a length of time within that range, or null for the limit of the consumer.';
        when 'idempotency_key' then
            raise exception '% has % characters, it must have 1 to 200', named, char_length(bad.idempotency_key)
                using errcode = 'WE003', hint = 'Null for none. A hash of what is longer is as good.';
    end case;
end
$$;
