-- weir.produce(topic, payload, key, headers, deliver_at, delay, priority, timeout, idempotency_key): stores one message in the
-- caller's transaction; returns its id.
--
-- topic       an existing topic of format json or jsonb
-- payload     the message, not null. A json topic keeps its text byte for byte
-- key         what the message is about, at most 1,024 bytes; null for none
-- headers     a JSON object, null for none
-- deliver_at  it is handed out at that time, before the year 10000; at once when that is past. Null: at once
-- delay       the same as a length of time from now, 0 s to 10 years. Not both
-- priority    -10 to 10, null for 0. A queue group hands out higher ones first
-- timeout     how long a handler may take for it at the most, up to 7 days; null for the consumer's own limit
-- idempotency_key  1 to 200 characters, null for none. A message whose key the topic remembers (its option idempotency_ttl)
--             is a duplicate: it is not stored, and the id of the first is returned. While the first is in flight this
--             waits for it; if that one rolls back, this one is stored
--
-- The message can be seen once the caller's transaction has committed, and leaves no trace if that rolls back.
-- Errors: WE001 (no such topic), WE003 (a bad argument), WE005 (a bytes topic), WE006 (a standby), WE007 (the sequence
-- was set back), 42501 (the topic is restricted). Locks: as an insert; with an idempotency key, the row of the key before that.
create or replace function weir.produce(
    topic text, payload json, key text default null, headers jsonb default null, deliver_at timestamptz default null,
    delay interval default null, priority int default null, timeout interval default null, idempotency_key text default null
)
returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    target record := weir.producing_to(topic, false, 1);
    new_id bigint;
begin
    if octet_length(key) > 1024 or num_nonnulls(deliver_at, delay, priority, timeout, idempotency_key) > 0
        or (target.into_topic).compact or target.near
    then
        return weir.store_one(
            target.into_topic, target.near, payload, key, headers, deliver_at, delay, priority, timeout, idempotency_key);
    end if;
    execute format('select (weir.log_%s_insert(array[$1], array[$2], array[$3]))[1]', (target.into_topic).id)
    into new_id using payload, key, headers;
    perform weir.after_produce(target.into_topic, new_id);
    return new_id;
end
$$;

-- weir.produce_bytes(topic, payload, key, headers, deliver_at, delay, priority, timeout, idempotency_key): the same for a topic
-- of format bytes.
create or replace function weir.produce_bytes(
    topic text, payload bytea, key text default null, headers jsonb default null, deliver_at timestamptz default null,
    delay interval default null, priority int default null, timeout interval default null, idempotency_key text default null
)
returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    target record := weir.producing_to(topic, true, 1);
    new_id bigint;
begin
    if octet_length(key) > 1024 or num_nonnulls(deliver_at, delay, priority, timeout, idempotency_key) > 0
        or (target.into_topic).compact or target.near
    then
        return weir.store_one(
            target.into_topic, target.near, payload, key, headers, deliver_at, delay, priority, timeout, idempotency_key);
    end if;
    execute format('select (weir.log_%s_insert(array[$1], array[$2], array[$3]))[1]', (target.into_topic).id)
    into new_id using payload, key, headers;
    perform weir.after_produce(target.into_topic, new_id);
    return new_id;
end
$$;

-- weir.producing_to(topic, bytes, messages): the topic of that name, when it takes such payloads, with room made for so many messages.
-- near: the end of its last segment is near all the same. Refuses to draw ids of a sequence that was left behind.
create or replace function weir.producing_to(
    topic text, bytes boolean, messages bigint, out into_topic weir.topic, out near boolean
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    w record;
begin
    if pg_is_in_recovery() then
        perform weir.check_primary();
    end if;
    select
        t as topic, s.low, s.high, coalesce(pg_sequence_last_value(t.sequence), 0) as drawn,
        (select max(r.reached) from weir.fence_rows as r where r.topic_id = t.id) as reached
    into w
    from weir.topic as t
    left join lateral (
        select x.low, x.high from weir.segment as x where x.topic_id = t.id order by x.high desc limit 1
    ) as s on true
    where t.name = producing_to.topic;
    into_topic := w.topic;
    if into_topic.id is null then
        into_topic := weir.topic_named(topic);
    end if;
    if (into_topic.format = 'bytes') <> bytes then
        raise exception 'topic % has format %', quote_literal(topic), into_topic.format
            using errcode = 'WE005',
                  hint = format('Use weir.produce%s() or weir.produce_many%1$s() for it.', case when not bytes then '_bytes' end);
    end if;
    if into_topic.restricted then
        perform weir.check_right(into_topic, 'INSERT');
    end if;
    if w.drawn = 0 then
        -- Nobody may have been there yet but whoever copied the log.
        execute format('select greatest($1, max(l.id)) from weir.log_%s as l', into_topic.id) into w.reached using w.reached;
    end if;
    -- Before the insert, which would fail on the key of an id that is issued again, and not say why.
    if w.drawn < w.reached then
        perform weir.check_sequence(into_topic.id, w.reached, w.drawn);
    end if;
    -- As in weir.make_way, which looks again.
    near := w.high - w.drawn < 4 * messages + 20000 or w.drawn + messages > (w.low + w.high) / 2;
    if near then
        near := weir.make_way(into_topic, messages);
    end if;
end
$$;

-- weir.after_produce(topic, first_id): refuses ids that groups are past already.
create or replace function weir.after_produce(into_topic weir.topic, first_id bigint) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    settled bigint;
begin
    -- Again after the insert, for a sequence that was set back meanwhile, or an id from a session's cache. What is settled cannot
    -- reach further than what was drawn, which costs less to know.
    select max(r.reached) into settled from weir.fence_rows as r where r.topic_id = into_topic.id;
    if first_id > settled then
        return;
    end if;
    select max(r.bound) into settled from weir.fence_rows as r where r.topic_id = into_topic.id;
    if first_id <= settled then
        -- A pair that waits for this transaction looks decided to its own snapshot, and to no other.
        select max(case when pg_current_xact_id() = any (f.holders) then f.settled else r.bound end)
        into settled
        from weir.fence as f
        join weir.fence_rows as r on r.topic_id = f.topic_id and r.slot = f.slot
        where f.topic_id = into_topic.id;
        if first_id <= settled then
            perform weir.check_sequence(into_topic.id, settled, first_id - 1, false);
        end if;
    end if;
end
$$;
