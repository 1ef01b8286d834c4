-- weir.produce(topic, payload, key, headers): stores one message in the caller's transaction; returns its id.
--
-- topic    an existing topic of format json or jsonb
-- payload  the message, not null. A json topic keeps its text byte for byte
-- key      what the message is about; null for none
-- headers  a JSON object, null for none
--
-- The message can be seen once the caller's transaction has committed, and leaves no trace if that rolls back.
-- Errors: WE001 (no such topic), WE003 (a bad argument), WE005 (a bytes topic), WE006 (a standby), WE007 (the sequence
-- was set back). Locks: as an insert.
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

-- weir.produce_bytes(topic, payload, key, headers): the same for a topic of format bytes.
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

-- weir.producing_to(topic, bytes): the topic of that name, when it takes such payloads. Refuses to draw ids of a sequence
-- that was left behind.
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
    -- Before the insert, which would fail on the key of an id that is issued again, and not say why.
    select max(r.reached) into reached from weir.fence_rows as r where r.topic_id = into_topic.id;
    drawn := coalesce(pg_sequence_last_value(into_topic.sequence), 0);
    if drawn = 0 then
        -- Nobody may have been there yet but whoever copied the log.
        execute format('select greatest($1, max(l.id)) from weir.log_%s as l', into_topic.id) into reached using reached;
    end if;
    if drawn < reached then
        perform weir.check_sequence(into_topic.id, reached, drawn);
    end if;
    return into_topic;
end
$$;

-- weir.after_produce(topic, first, last): refuses ids that groups are past already, and has the next segment made in time.
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
    -- Again after the insert, for a sequence that was set back meanwhile, or an id from a session's cache.
    select max(r.bound) into settled from weir.fence_rows as r where r.topic_id = into_topic.id;
    if first_id <= settled then
        -- A pair that waits for this transaction looks decided to its own snapshot, and to no other.
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
