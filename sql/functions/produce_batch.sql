-- weir.produce_batch(topic, payloads, keys, headers, deliver_at, delays, priorities, timeouts, idempotency_keys, producer, batch): what
-- weir.produce_many does, for programs: it tells duplicates, and can be repeated.
--
-- topic to idempotency_keys  as weir.produce_many
-- delays    as the delay of weir.produce
-- producer  a random uuid of the caller's, null for none. It sends one batch at a time
-- batch     its number, 1 or more, greater than that of the producer's batch before
--
-- Called again with the same producer, batch and messages, after an attempt whose outcome the caller does not know, it stores
-- them once: an attempt that is still under way is waited for, and where it was stored its result is returned.
--
-- Returns a row for each payload, in their order: the id, and whether it is that of an earlier message with the same
-- idempotency key.
-- Errors: as weir.produce_many; WE009 (the producer has gone on, or the batch was closed, or held other messages).
-- Locks: the producer, then as weir.produce_many.
create or replace function weir.produce_batch(
    topic text, payloads json[], keys text[] default null, headers jsonb[] default null, deliver_at timestamptz[] default null,
    delays interval[] default null, priorities int[] default null, timeouts interval[] default null,
    idempotency_keys text[] default null, producer uuid default null, batch bigint default null
)
returns table (id bigint, duplicate boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    target record;
    last bigint;
    ids bigint[];
begin
    if producer is not null or batch is not null then
        last := weir.open_batch(producer, batch);
    end if;
    if last = batch then
        ids := weir.repeated_batch(producer, batch, topic, cardinality(payloads));
    else
        target := weir.producing_to(topic, false, cardinality(payloads));
        ids := weir.store_messages(
            target.into_topic, target.near, payloads, keys, headers, deliver_at, delays, priorities, timeouts, idempotency_keys, false);
        if last is not null then
            perform weir.write_batch(producer, batch, last, true, (target.into_topic).id, ids);
        end if;
    end if;
    return query select abs(i), i < 0 from unnest(ids) as i;
end
$$;

-- weir.produce_batch_bytes(...): the same for a topic of format bytes.
create or replace function weir.produce_batch_bytes(
    topic text, payloads bytea[], keys text[] default null, headers jsonb[] default null, deliver_at timestamptz[] default null,
    delays interval[] default null, priorities int[] default null, timeouts interval[] default null,
    idempotency_keys text[] default null, producer uuid default null, batch bigint default null
)
returns table (id bigint, duplicate boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    target record;
    last bigint;
    ids bigint[];
begin
    if producer is not null or batch is not null then
        last := weir.open_batch(producer, batch);
    end if;
    if last = batch then
        ids := weir.repeated_batch(producer, batch, topic, cardinality(payloads));
    else
        target := weir.producing_to(topic, true, cardinality(payloads));
        ids := weir.store_messages(
            target.into_topic, target.near, payloads, keys, headers, deliver_at, delays, priorities, timeouts, idempotency_keys, false);
        if last is not null then
            perform weir.write_batch(producer, batch, last, true, (target.into_topic).id, ids);
        end if;
    end if;
    return query select abs(i), i < 0 from unnest(ids) as i;
end
$$;

-- weir.record_batch(producer, batch): records a batch as stored, in the transaction that stores it. For clients that INSERT or
-- COPY into a log: call it last, together with the commit, so that weir.close_batch waits for neither.
--
-- Errors: WE003, WE009. Locks: the producer.
create or replace function weir.record_batch(producer uuid, batch bigint) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    last bigint;
begin
    perform weir.check_primary();
    last := weir.open_batch(producer, batch);
    if last = batch then
        perform weir.refuse_batch(producer, batch, last);
    end if;
    perform weir.write_batch(producer, batch, last, true, null, null);
end
$$;

-- weir.close_batch(producer, batch): was the batch stored? After false it never will be: an attempt that comes later is refused.
--
-- An attempt that is under way is waited for. Errors: WE003, WE006, WE009 (the producer has gone on). Locks: the producer.
create or replace function weir.close_batch(producer uuid, batch bigint) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    last bigint;
begin
    perform weir.check_primary();
    last := weir.open_batch(producer, batch);
    if last = batch then
        return (select p.stored from weir.producer as p where p.id = producer and p.part = close_batch.batch / 100);
    end if;
    perform weir.write_batch(producer, batch, last, false, null, null);
    return false;
end
$$;

-- weir.open_batch(producer, batch): locks a producer; returns the number of its last batch, 0 for none. Errors: WE003, WE009 (batch
-- is below that).
--
-- The lock is what makes a repeated batch find the attempt before it, in each of these orders:
-- - The first attempt has committed, its answer was lost. The row says so.
-- - The first attempt still runs, on a connection that the client has given up. It has the lock, from here to the end of its
--   transaction; the repetition waits, and reads the row in a statement that begins after that. Without the lock both would
--   read the row of the batch before, and both insert; so too where there is no row yet, which no row lock could cover.
-- - The first attempt arrives after the repetition has committed: it finds its own number and returns what is stored. After
--   the producer has gone on, or has closed the batch, it finds a higher one, or a closed one, and is refused.
-- - The server crashes: the row and the messages are one transaction, so both are there or neither.
-- A transaction becomes visible before it lets go of its locks, so the statement after the lock sees what it has written. In
-- REPEATABLE READ it would read the snapshot of the transaction's begin, in which a batch that is stored is not there.
create or replace function weir.open_batch(producer uuid, batch bigint) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    last bigint;
begin
    if producer is null then
        raise exception 'producer is null, but batch is given'
            using errcode = 'WE003', hint = 'Give a random uuid, or neither.';
    end if;
    if batch is null or batch < 1 then
        perform weir.check_range('batch', batch, 1, 9e18);
    end if;
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'a batch that can be repeated needs isolation level read committed, this transaction has %',
                current_setting('transaction_isolation')
            using errcode = 'WE003',
                  detail = 'A snapshot that is older than the attempt before does not show it, and the messages would be stored twice.',
                  hint = 'Begin the transaction with: begin isolation level read committed. Or leave producer and batch out.';
    end if;
    perform pg_advisory_xact_lock(uuid_hash_extended(producer, 0));
    -- The newest part first: the look-up never comes to those that were deleted.
    select p.batch into last from weir.producer as p where p.id = producer order by p.part desc limit 1;
    if last > batch then
        perform weir.refuse_batch(producer, batch, last);
    end if;
    return coalesce(last, 0);
end
$$;

-- weir.write_batch(producer, batch, last, stored, topic_id, ids): the producer's last batch, in place of the one that was.
create or replace function weir.write_batch(producer uuid, batch bigint, last bigint, stored boolean, topic_id int, ids bigint[])
returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    low bigint := ids[1];
    high bigint := ids[cardinality(ids)];
begin
    if high - low = cardinality(ids) - 1 and not 0 > any (ids) then
        ids := null;
    end if;
    update weir.producer as p
    set batch = write_batch.batch, stored = write_batch.stored, topic_id = write_batch.topic_id, first_id = low, last_id = high,
        ids = write_batch.ids, at = clock_timestamp()
    where p.id = producer and p.part = write_batch.batch / 100;
    if not found then
        insert into weir.producer (id, part, batch, stored, topic_id, first_id, last_id, ids)
        values (producer, batch / 100, batch, stored, topic_id, low, high, ids);
        delete from weir.producer as p where p.id = producer and p.part = last / 100 and p.part < write_batch.batch / 100;
    end if;
end
$$;

-- weir.repeated_batch(producer, batch, topic, messages): what was returned for a batch that is the producer's last. Errors: WE009.
create or replace function weir.repeated_batch(producer uuid, batch bigint, topic text, messages int) returns bigint[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    found_batch weir.producer;
    ids bigint[];
begin
    select p.* into found_batch from weir.producer as p where p.id = producer and p.part = repeated_batch.batch / 100;
    ids := coalesce(found_batch.ids, array(select generate_series(found_batch.first_id, found_batch.last_id)));
    if not found_batch.stored
        or found_batch.topic_id is distinct from (select t.id from weir.topic as t where t.name = repeated_batch.topic)
        or cardinality(ids) <> messages
    then
        perform weir.refuse_batch(producer, batch, batch);
    end if;
    return ids;
end
$$;

-- weir.refuse_batch(producer, batch, last): raises WE009.
create or replace function weir.refuse_batch(producer uuid, batch bigint, last bigint) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception 'batch % of producer % was used already, for other messages or none: its last is %', batch, producer, last
        using errcode = 'WE009',
              detail = 'Nothing was stored by this call.',
              hint = 'Give each batch a number above the last. Only the last can be repeated, with the same messages.';
end
$$;
