-- weir.seal(of_topic): notes of a segment whose ids are all settled how many messages and bytes it has and of which time they are, and
-- has it analyzed. Returns what it did, null for nothing.
--
-- Locks: SHARE UPDATE EXCLUSIVE on the segment.
create or replace function weir.seal(of_topic weir.topic) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    settled bigint;
    part weir.segment;
    part_name text;
    oldest timestamptz;
    newest timestamptz;
    sealed int;
begin
    select s.* into part
    from weir.segment as s
    where s.topic_id = of_topic.id and s.sealed_at is null
      -- The last one stays, or the numbers of ids and segments would begin anew.
      and exists (select from weir.segment as x where x.topic_id = of_topic.id and x.low >= s.high)
    order by s.high
    limit 1;
    select max(r.bound) into settled from weir.fence_rows as r where r.topic_id = of_topic.id;
    if settled < part.high - 1 then
        -- Nobody may consume this topic.
        settled := weir.settled_head_if_drawn(of_topic, part.high - 1);
    end if;
    if settled >= part.high - 1 then
        part_name := format('weir.log_%s_%s', of_topic.id, part.number);
        execute format('analyze %s', part_name);
        execute format('select produced_at from %s order by id limit 1', part_name) into oldest;
        execute format('select produced_at from %s order by id desc limit 1', part_name) into newest;
        update weir.segment as s
        set sealed_at = clock_timestamp(), first_at = oldest, last_at = newest,
            messages = (select greatest(c.reltuples, 0) from pg_class as c where c.oid = part_name::regclass),
            bytes = pg_total_relation_size(part_name::regclass)
        where s.topic_id = of_topic.id and s.number = part.number;
        return format('sealed: segment %s', part.number);
    end if;
    -- Vacuum and its kin never analyze a partitioned table as a whole. Each time when it has doubled, and not when that takes long.
    select count(*) into sealed from weir.segment as s where s.topic_id = of_topic.id and s.sealed_at is not null;
    if sealed between greatest(2 * of_topic.analyzed, 1) and 32 then
        execute format('analyze weir.log_%s', of_topic.id);
        update weir.topic as t set analyzed = sealed where t.id = of_topic.id;
        return 'analyzed: the log';
    end if;
    return null;
end
$$;

-- weir.settled_head_if_drawn(of_topic, id): the settled head, after an attempt to move it on where the sequence has passed id: what is
-- idle is not observed.
create or replace function weir.settled_head_if_drawn(of_topic weir.topic, id bigint) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if weir.drawn(of_topic.id) < id then
        return 0;
    end if;
    -- Ids that were burned at the end are passed too: this call's transaction is short, and the sequence is read exactly.
    return weir.settle_drawn(of_topic);
end
$$;

-- weir.settle_drawn(of_topic): puts the sequence's exact head before the fence, unless a pair waits; returns the settled head.
create or replace function weir.settle_drawn(of_topic weir.topic) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    f record;
    head bigint;
begin
    select max(r.bound) as bound, max(r.pending) as pending, pg_current_xact_id_if_assigned() is null as no_xid
    into f
    from weir.fence_rows as r
    where r.topic_id = of_topic.id;
    if f.pending > f.bound then
        return f.bound;
    end if;
    head := coalesce(pg_sequence_last_value(of_topic.sequence), 0);
    if head <= f.bound then
        return f.bound;
    end if;
    return weir.settle(of_topic.id, head, f.no_xid, false);
end
$$;

-- weir.retain(of_topic): removes the messages of the oldest segment, when they are past the topic's retention and no group needs them.
-- Returns what it did, null for nothing.
--
-- TRUNCATE frees the space at once and locks that segment alone: neither producers nor the consumers of later segments wait. The
-- table itself is dropped by weir.drop_emptied.
--
-- Whoever could need the segment from now on would have to set a cursor into it: weir.create_group and weir.seek wait at the gate,
-- and find it removed. A redrive needs no log, since a delivery has a copy.
--
-- Locks: the gate, then ACCESS EXCLUSIVE on the segment; waits for them a moment only.
create or replace function weir.retain(of_topic weir.topic) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    part weir.segment;
    needed bigint;
    total bigint;
    has_any boolean := false;
begin
    select s.* into part
    from weir.segment as s
    where s.topic_id = of_topic.id and s.emptied_at is null
    order by s.high
    limit 1;
    if part.sealed_at is null then
        return null;
    end if;
    if not coalesce(part.last_at < clock_timestamp() - of_topic.retention_age, false) then
        -- The number of messages is an estimate.
        if part.messages > 0 then
            has_any := true;
        else
            execute format('select exists (select from weir.log_%s_%s)', of_topic.id, part.number) into has_any;
        end if;
    end if;
    if has_any then
        if of_topic.retention_bytes is null then
            return null;
        end if;
        select sum(coalesce(s.bytes, pg_total_relation_size(format('weir.log_%s_%s', s.topic_id, s.number)::regclass)))
        into total
        from weir.segment as s
        where s.topic_id = of_topic.id and s.emptied_at is null;
        if total - part.bytes < of_topic.retention_bytes then
            return null;
        end if;
    end if;
    -- Before the gate, so that a group that is far behind costs nothing.
    select min(weir.committed(g.id)) into needed from weir.consumer_group as g where g.topic_id = of_topic.id;
    if needed < part.high - 1 and not of_topic.drop_unread then
        return null;
    end if;

    perform pg_advisory_xact_lock(weir.gate(of_topic.id));
    select min(weir.committed(g.id)) into needed from weir.consumer_group as g where g.topic_id = of_topic.id;
    if needed < part.high - 1 and not of_topic.drop_unread then
        return null;
    end if;
    execute format('lock table weir.log_%s_%s in access exclusive mode', of_topic.id, part.number);
    if needed < part.high - 1 then
        perform weir.tell_missed(g, part) from weir.consumer_group as g where g.topic_id = of_topic.id order by g.id;
    end if;
    execute format('truncate weir.log_%s_%s', of_topic.id, part.number);
    update weir.segment as s
    set emptied_at = clock_timestamp()
    where s.topic_id = of_topic.id and s.number = part.number;
    return format('emptied: segment %s, %s messages', part.number, part.messages);
end
$$;

-- weir.tell_missed(of_group, part): notes how many messages of a segment a group has yet to finish, and ends what it holds of them.
--
-- Locks: the group's shards, leases and cursor.
create or replace function weir.tell_missed(of_group weir.consumer_group, part weir.segment) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    at_id bigint;
    n bigint;
    lost bigint := 0;
    each record;
begin
    perform from weir.shard as s where s.group_id = of_group.id order by s.number for update;
    for each in
        delete from weir.lease as l
        where l.group_id = of_group.id and l.low < part.high - 1 and l.high >= part.low
        returning l.low, l.high, l.ids, coalesce(l.done, '{}') as done
    loop
        execute format('select count(*) from weir.log_%s_%s where id > $1 and id <= $2 and id <> all ($3)%s%s',
            part.topic_id, part.number, case when each.ids is not null then ' and id = any ($4)' end, weir.filter_sql(of_group))
        into n using each.low, each.high, each.done, each.ids, of_group.key_prefix, of_group.header_match;
        lost := lost + n;
    end loop;
    for each in
        delete from weir.shard_range as r
        where r.group_id = of_group.id and r.low < part.high - 1 and r.high >= part.low
        returning r.ids
    loop
        -- Some may have been deleted since (weir.delete_key).
        execute format('select count(*) from weir.log_%s_%s where id = any ($1)', part.topic_id, part.number) into n using each.ids;
        lost := lost + n;
    end loop;
    select c.claimed into at_id from weir.cursor as c where c.group_id = of_group.id for no key update;
    if at_id < part.high - 1 then
        execute format('select count(*) from weir.log_%s_%s where id > $1%s', part.topic_id, part.number, weir.filter_sql(of_group))
        into n using at_id, null, null, null, of_group.key_prefix, of_group.header_match;
        lost := lost + n;
        update weir.cursor as c set claimed = part.high - 1 where c.group_id = of_group.id;
    end if;
    if lost > 0 then
        update weir.consumer_group as g
        set missed = g.missed + lost, missed_at = clock_timestamp()
        where g.id = of_group.id;
    end if;
end
$$;

-- weir.keep_segments(topic_id): no segment of a topic is dropped from now on until this transaction ends, so that the list of them can
-- be gone through. Without it a segment could go between a look at the list and the query that names it.
--
-- Locks: ACCESS SHARE on the log, as any reader of it.
create or replace function weir.keep_segments(topic_id int) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    execute format('lock table only weir.log_%s in access share mode', topic_id);
end
$$;

-- weir.drop_emptied(of_topic): drops a segment that has no messages any more.
--
-- Locks: ACCESS EXCLUSIVE on the log, which producers wait for: so it waits for that lock only a few milliseconds, and tries again
-- another time.
create or replace function weir.drop_emptied(of_topic weir.topic) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    part weir.segment;
begin
    select s.* into part
    from weir.segment as s
    -- Whoever has listed it before it was emptied is done with it by now.
    where s.topic_id = of_topic.id and s.emptied_at < clock_timestamp() - interval '1 s'
    order by s.high
    limit 1;
    if part.number is null then
        return null;
    end if;
    perform set_config('lock_timeout', '10ms', true);
    -- Of the log only: its segments are not locked with it, however many there are.
    execute format('lock table only weir.log_%s in access exclusive mode', of_topic.id);
    perform set_config('lock_timeout', '50ms', true);
    execute format('drop table weir.log_%s_%s', of_topic.id, part.number);
    delete from weir.segment as s where s.topic_id = of_topic.id and s.number = part.number;
    return format('dropped: segment %s', part.number);
end
$$;

-- weir.roll(of_topic): skips the rest of the ids of the segment that is being written, when its oldest message has been there for a
-- quarter of the retention: a slow topic would else keep all of them until the newest is old enough.
--
-- The ids are drawn one by one: setval() could set back what a producer draws at the same moment.
create or replace function weir.roll(of_topic weir.topic) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    drawn bigint;
    part weir.segment;
    oldest timestamptz;
begin
    if of_topic.retention_age is null then
        return null;
    end if;
    drawn := weir.drawn(of_topic.id);
    select s.* into part
    from weir.segment as s
    where s.topic_id = of_topic.id and s.low <= drawn and s.high > drawn + 1 and s.sealed_at is null
    order by s.high
    limit 1;
    if part.number is null or part.high - drawn > 1000001
        or not exists (select from weir.segment as s where s.topic_id = of_topic.id and s.low >= part.high)
    then
        return null;
    end if;
    execute format('select produced_at from weir.log_%s_%s order by id limit 1', of_topic.id, part.number) into oldest;
    if oldest is null or oldest > clock_timestamp() - of_topic.retention_age / 4 then
        return null;
    end if;
    -- The xid before the ids, as a producer (weir.create_topic).
    perform pg_current_xact_id();
    perform nextval(of_topic.sequence) from generate_series(1, part.high - 1 - drawn);
    return format('rolled: segment %s', part.number);
end
$$;

-- weir.extend_ahead(of_topic): makes a segment ahead of need, when the last one is being written.
create or replace function weir.extend_ahead(of_topic weir.topic) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    drawn bigint;
    last weir.segment;
begin
    drawn := weir.drawn(of_topic.id);
    select s.* into last from weir.segment as s where s.topic_id = of_topic.id order by s.high desc limit 1;
    if drawn < last.low then
        return null;
    end if;
    perform weir.extend_log(of_topic.id, drawn, false);
    if not exists (select from weir.segment as s where s.topic_id = of_topic.id and s.low >= last.high) then
        -- A transaction that has yet to commit is at it.
        raise lock_not_available;
    end if;
    return format('extended: segment %s', last.number + 1);
end
$$;
