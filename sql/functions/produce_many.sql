-- weir.produce_many(topic, payloads, keys, headers): stores many messages in the caller's transaction; returns their ids
-- in the order of payloads.
--
-- topic     an existing topic of format json or jsonb
-- payloads  the messages, none of them null
-- keys, headers  null, or arrays of the same length
--
-- Errors and locks: as weir.produce; WE003 where the lengths differ.
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

-- weir.produce_many_bytes(topic, payloads, keys, headers): the same for a topic of format bytes.
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

-- weir.produce_many_sql(topic, count, keys, headers): checks the lengths, makes room where the batch is a large one, and
-- returns the insert, which gives the array of its ids.
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

-- weir.make_room(topic, messages): has the segments made that so many more messages need. For clients that COPY into a log:
-- call it before, at most a segment's worth at a time.
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
    -- COPY itself checks nothing.
    select max(r.reached) into reached from weir.fence_rows as r where r.topic_id = into_topic.id;
    drawn := weir.drawn(into_topic.id);
    if drawn < reached then
        perform weir.check_sequence(into_topic.id, reached, weir.drawn(into_topic.id));
    end if;
    select s.high - drawn into room from weir.segment as s where s.topic_id = into_topic.id order by s.high desc limit 1;
    if room < messages + into_topic.segment_size then
        -- With messages to spare, whoever is at it already will be done in time.
        perform weir.extend_log(into_topic.id, drawn + messages, room < messages + 1000);
    end if;
end
$$;
