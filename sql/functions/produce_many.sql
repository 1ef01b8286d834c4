-- weir.produce_many(topic, payloads, keys, headers, deliver_at, priorities, timeouts, idempotency_keys): stores many messages in the
-- caller's transaction; returns their ids in the order of payloads.
--
-- topic     an existing topic of format json or jsonb
-- payloads  the messages, none of them null
-- keys to idempotency_keys  null, or arrays of the same length: what weir.produce takes, with nulls where a message has none
--
-- A duplicate gives the id of the first, at its place; a later message with the same idempotency key is one of the earlier.
-- Errors and locks: as weir.produce; WE003 where the lengths differ.
create or replace function weir.produce_many(
    topic text, payloads json[], keys text[] default null, headers jsonb[] default null, deliver_at timestamptz[] default null,
    priorities int[] default null, timeouts interval[] default null, idempotency_keys text[] default null
)
returns setof bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    target record := weir.producing_to(topic, false, cardinality(payloads));
    ids bigint[];
begin
    ids := weir.store_messages(
        target.into_topic, target.near, payloads, keys, headers, deliver_at, null, priorities, timeouts, idempotency_keys, false);
    return query select abs(i) from unnest(ids) as i;
end
$$;

-- weir.produce_many_bytes(topic, payloads, keys, headers, deliver_at, priorities, timeouts, idempotency_keys): the same for a topic
-- of format bytes.
create or replace function weir.produce_many_bytes(
    topic text, payloads bytea[], keys text[] default null, headers jsonb[] default null, deliver_at timestamptz[] default null,
    priorities int[] default null, timeouts interval[] default null, idempotency_keys text[] default null
)
returns setof bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    target record := weir.producing_to(topic, true, cardinality(payloads));
    ids bigint[];
begin
    ids := weir.store_messages(
        target.into_topic, target.near, payloads, keys, headers, deliver_at, null, priorities, timeouts, idempotency_keys, false);
    return query select abs(i) from unnest(ids) as i;
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
begin
    perform weir.check_range('messages', messages, 1, 1000000000);
    perform weir.check_right(into_topic, 'INSERT');
    -- COPY itself checks nothing.
    select max(r.reached) into reached from weir.fence_rows as r where r.topic_id = into_topic.id;
    if weir.drawn(into_topic.id) < reached then
        perform weir.check_sequence(into_topic.id, reached, weir.drawn(into_topic.id));
    end if;
    perform weir.make_way(into_topic, messages);
end
$$;

-- weir.make_way(topic, messages): has segments made where so many more messages would not leave much of the last one. Returns whether
-- the end is near all the same.
--
-- Consumers and maintenance make segments as soon as the last one is begun (weir.poll, weir.extend_ahead). A producer does it
-- where they have not: its transaction may be a long one, and nobody else can use the segment before its end.
create or replace function weir.make_way(into_topic weir.topic, messages bigint) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    drawn bigint := coalesce(pg_sequence_last_value(into_topic.sequence), 0);
    last record;
    near boolean;
begin
    select s.low, s.high into last from weir.segment as s where s.topic_id = into_topic.id order by s.high desc limit 1;
    near := last.high - drawn < 4 * messages + 20000;
    if drawn + messages > (last.low + last.high) / 2 then
        -- While there is room, whoever is at it already will be done in time.
        perform weir.extend_log(into_topic.id, drawn + messages, near);
    end if;
    return near;
end
$$;
