-- weir.poll(topic, grp, consumer, max_messages, lease, max_bytes, acks, own_transaction): one turn of a consumer: moves the fence
-- where that is due, acknowledges what was handled, takes what there is to take.
--
-- consumer      names the holder; unique to a process and its life
-- max_messages  how many messages to take at the most, 0 (acknowledge only) to 10,000
-- lease         how long they stay this consumer's, 100 ms to 1 day
-- max_bytes     how many bytes of payload to take at the most; a single larger message is taken alone
-- acks          leases to acknowledge in the same transaction, null for none
-- own_transaction  true when this call is all of its transaction. Its commit then does not wait for the disk
--               (synchronous_commit off): a crash of the server repeats some work, it loses none. And the head is read with
--               pg_sequence_last_value(): exact, since it reads under the lock that nextval() writes under, and quick; but
--               it takes a producer's lock until the transaction ends, so that a long transaction would hold up the
--               proof by lock of every group. false: the head is the highest visible id (weir.head)
--
-- Returns a row for each thing the consumer has to know:
--   state     lease_id  low, high         attempt
--   fresh     the lease (low, high]       1             a range nobody has had; in an ordered group, a shard with messages from it
--   takeover  the lease (low, high]       2 or more     one whose lease expired or was released
--   retry     the lease (id - 1, id]      1 or more     a delivery
--   lost      the lease null              null          an entry of acks that was not this consumer's any more
--   waiting   null      settled, head     null          nothing to take, but messages wait for the fence
--   later     null      null, n           null          nothing to take, but a lease expires or a delivery is due in n ms, or
--                                                       there is more to look through
--   paused    null      null              null          the group is paused: nothing is handed out
--
-- When there is nothing to do it is one read-only statement and assigns no xid. A single range that it has claimed is known to
-- weir.claimed.
--
-- Errors: WE001, WE002, WE003, WE006 (a standby), WE007 and WE008 (a broken sequence), 42501 (the topic is restricted).
-- Locks, in this order: a row of weir.fence (never waits), after a crash the advisory lock of lease numbers, the leases acknowledged,
-- one expired lease (skips those that others have).
-- Then, in a stream group, deliveries (skips), and the group's cursor (waits); in an ordered group rows of weir.shard (skips), and
-- the cursor where nobody has it; in a queue group the cursor where nobody has it, and then deliveries (skips). All are held until the
-- transaction ends.
-- Indexes: primary keys, topic_name_unique, group_name_unique, lease_expiry, delivery_due, delivery_suspect, delivery_lease.
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
    on_group weir.consumer_group;
    more boolean := false;
    no_room boolean := false;
    retried boolean := false;
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
    if current_setting('weir_session.claimed', true) <> '' then
        perform set_config('weir_session.claimed', '', false);
    end if;

    select
        t.id as topic_id, t.format, t.sequence, t.restricted, g.id as group_id, g.mode, g.paused_at is not null as paused, c.claimed,
        f.bound, f.pending, f.reached, f.overdue,
        pg_is_in_recovery() as standby,
        pg_current_xact_id_if_assigned() is null as no_xid,
        (select l.expires_at from weir.lease as l where l.group_id = g.id order by l.expires_at limit 1) as next_expiry,
        least(
            (
                select d.due_at from weir.delivery as d
                where d.group_id = g.id and (d.state = 'leased' or d.state = 'ready' and not d.suspect)
                order by d.due_at limit 1
            ),
            (
                select d.due_at from weir.delivery as d
                where d.group_id = g.id and d.suspect and d.state = 'ready'
                order by d.due_at limit 1
            )
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
    if w.restricted then
        perform weir.check_right(weir.topic_named(topic), 'SELECT');
    end if;
    if w.paused then
        if acks is not null then
            if own_transaction then
                perform set_config('synchronous_commit', 'off', true);
            end if;
            return query select l.state, l.lease_id, l.low, l.high, l.attempt from weir.ack_lost(acks, consumer) as l;
        end if;
        return query select 'paused', null::bigint, null::bigint, null::bigint, null::int;
        return;
    end if;
    settled := w.bound;
    if w.pending <= settled then
        w.pending := null; -- another pair was proven before it, and reaches further
    end if;
    expired := coalesce(w.next_expiry <= now_at, false);
    due := coalesce(w.next_due <= now_at, false);
    if w.mode = 'ordered' then
        -- What is due can belong to a shard that is held, and is then its holder's affair.
        due := (due or exists (select from weir.shard_range as r where r.group_id = w.group_id))
            and exists (select from weir.free_shards(w.group_id, now_at));
        if not due and w.next_due <= now_at then
            w.next_due := null;
        end if;
    end if;

    -- Behind the settled head there is nothing to find out, unless this call is to take the last of it.
    if w.claimed + (case w.mode when 'stream' then max_messages else 10000 end) >= settled then
        drawn := case when own_transaction then coalesce(pg_sequence_last_value(w.sequence), 0) else weir.drawn(w.topic_id) end;
        -- A sequence that has given out nothing looks as an empty topic's, and as one that was copied without it.
        if drawn < greatest(w.reached, 1) then
            perform weir.check_sequence(w.topic_id, greatest(w.reached, 1), weir.drawn(w.topic_id));
        end if;
        -- A pair that waits is left alone, but for the second resort: something has held back xmin for a while. Is it a
        -- producer of this topic?
        look := w.pending is not null and w.overdue and weir.may_look();
        if drawn > settled and (w.pending is null or look) then
            head := case when own_transaction then drawn else weir.head(w.topic_id, settled) end;
        end if;
        -- The next segment is made here, and not only by producers: one in a long transaction would make it for itself alone,
        -- until that ends.
        if own_transaction and drawn > settled and head is null then
            no_room := drawn >= (select s.low from weir.segment as s where s.topic_id = w.topic_id order by s.high desc limit 1);
        end if;
    end if;

    if head is null and not no_room and acks is null and not expired and not due and w.claimed >= settled then
        if w.pending > w.claimed then
            return query select 'waiting', null::bigint, settled, w.pending, null::int;
        end if;
        if w.next_expiry is not null or w.next_due is not null then
            return query select 'later', null::bigint, null::bigint,
                ceil(extract(epoch from least(w.next_expiry, w.next_due) - now_at) * 1000)::bigint, null::int;
        end if;
        return;
    end if;

    -- From here on the transaction writes.
    if own_transaction then
        perform set_config('synchronous_commit', 'off', true);
    end if;
    if head is not null then
        -- First of all writes: any other would give this transaction its xid before the head is read.
        perform weir.check_sequence(w.topic_id, settled, drawn);
        settled := weir.settle(w.topic_id, head, w.no_xid, look or not w.no_xid and weir.may_look());
    end if;
    if head is not null and own_transaction then
        no_room := drawn >= (select s.low from weir.segment as s where s.topic_id = w.topic_id order by s.high desc limit 1);
    end if;
    if no_room then
        perform weir.extend_log(w.topic_id, drawn, false);
    end if;

    if not exists (select from weir.since_crash) then
        perform weir.skip_leases();
    end if;
    if acks is not null then
        return query select l.state, l.lease_id, l.low, l.high, l.attempt from weir.ack_lost(acks, consumer) as l;
    end if;

    if max_messages > 0 then
        select g.* into on_group from weir.consumer_group as g where g.id = w.group_id;
        if on_group.paused_at is not null then -- meanwhile
            max_messages := 0;
        end if;
    end if;
    if expired and max_messages > 0 then
        select l.* into taken from weir.take_over(on_group, consumer, lease) as l;
        if taken.id is not null then
            perform set_config('weir_session.claimed', taken.id::text, false);
            return query select 'takeover', taken.id, taken.low, taken.high, taken.attempt;
            return;
        end if;
        -- A peer won, or it was split into deliveries.
        due := true;
    end if;

    if max_messages > 0 and on_group.mode = 'ordered' then
        -- An acknowledgement has freed a shard, perhaps one with more to do.
        if due or w.claimed < settled or acks is not null then
            for taken in
                select c.* from weir.claim_shards(on_group, w.format, settled, consumer, max_messages, lease, max_bytes) as c
            loop
                return query select 'fresh', taken.lease_id, taken.low, taken.high, 1;
                more := true;
            end loop;
            if more then
                return;
            end if;
            select c.claimed < settled into more from weir.cursor as c where c.group_id = on_group.id;
        end if;
    elsif max_messages > 0 then
        if on_group.mode = 'queue' and w.claimed < settled then
            more := weir.feed_queue(on_group, w.format, settled);
            due := true;
        end if;
        if due then
            for taken in
                select d.* from weir.claim_deliveries(on_group, consumer, max_messages, lease, max_bytes) as d
            loop
                retried := true;
                max_messages := max_messages - 1;
                max_bytes := max_bytes - taken.bytes;
                return query select 'retry', taken.lease_id, taken.message_id - 1, taken.message_id, taken.attempt;
            end loop;
        end if;
        if on_group.mode = 'stream' and w.claimed < settled and max_messages > 0 and max_bytes > 0 then
            select c.* into taken
            from weir.claim_range(on_group, w.format, settled, consumer, max_messages, lease, max_bytes) as c;
            if taken.lease_id is not null then
                if not retried then
                    perform set_config('weir_session.claimed', taken.lease_id::text, false);
                end if;
                return query select 'fresh', taken.lease_id, taken.low, taken.high, 1;
                return;
            end if;
            more := taken.more;
        end if;
    end if;

    if more then
        return query select 'later', null::bigint, null::bigint, 1::bigint, null::int;
        return;
    end if;
    if greatest(head, w.pending) > settled then
        return query select 'waiting', null::bigint, settled, greatest(head, w.pending), null::int;
        return;
    end if;
    if least(w.next_expiry, w.next_due) > now_at then
        return query select 'later', null::bigint, null::bigint,
            ceil(extract(epoch from least(w.next_expiry, w.next_due) - now_at) * 1000)::bigint, null::int;
    end if;
end
$$;

-- weir.ack_lost(lease_ids, consumer): acknowledges leases; returns those that were lost, as rows of weir.poll.
create or replace function weir.ack_lost(lease_ids bigint[], consumer text)
returns table (state text, lease_id bigint, low bigint, high bigint, attempt int)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    acked bigint[] := array(select k.id from weir.ack_many(lease_ids, consumer) as k (id));
begin
    if cardinality(acked) < cardinality(lease_ids) then
        return query
        select 'lost', a.id, null::bigint, null::bigint, null::int from unnest(lease_ids) as a (id) where a.id <> all (acked);
    end if;
end
$$;
