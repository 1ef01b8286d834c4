-- weir.compact(of_topic): of a compacted topic, removes messages that a later one of their key replaces, and tombstones that are past
-- their time. Returns what it did, null for nothing.
--
-- A step compares one sealed segment with itself or one before it, so its length does not depend on how many there are. Nothing is
-- removed that a group has yet to claim or finish: a group that starts later gets the latest message of each key, one that is there
-- gets every message.
--
-- Locks: rows of one segment; ACCESS EXCLUSIVE on it where it is written anew. Index: (key, id) of a compacted log.
create or replace function weir.compact(of_topic weir.topic) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
    needed bigint;
    part weir.segment;
    older weir.segment;
    n bigint;
begin
    if not of_topic.compact then
        return null;
    end if;

    -- Written anew is what has lost more than it has left, and is not being read.
    select s.* into part
    from weir.segment as s
    where s.topic_id = of_topic.id and s.sealed_at is not null and s.emptied_at is null and s.removed > greatest(s.messages, 1000)
    order by s.high
    limit 1;
    if part.number is not null then
        perform weir.rewrite_segment(part);
        return format('rewritten: segment %s', part.number);
    end if;

    select min(weir.committed(g.id)) into needed from weir.consumer_group as g where g.topic_id = of_topic.id;

    -- The first segment that has not been compared with all before it.
    select s.* into part
    from weir.segment as s
    where s.topic_id = of_topic.id and s.sealed_at is not null and s.emptied_at is null and s.compared < s.number
      and (needed is null or s.high - 1 <= needed)
    order by s.high
    limit 1;
    if part.number is not null then
        select s.* into older
        from weir.segment as s
        where s.topic_id = of_topic.id and s.number > part.compared and s.number <= part.number and s.emptied_at is null
        order by s.number
        limit 1;
        execute format(
            'delete from weir.log_%1$s_%2$s as o
             using (select key, max(id) as id from weir.log_%1$s_%3$s where id < $1 group by key) as n
             where o.key = n.key and o.id < n.id',
            of_topic.id, older.number, part.number)
        using part.high;
        get diagnostics n = row_count;
        update weir.segment as s set compared = older.number where s.topic_id = of_topic.id and s.number = part.number;
        update weir.segment as s
        set removed = s.removed + n, messages = greatest(s.messages - n, 0)
        where s.topic_id = of_topic.id and s.number = older.number and n > 0;
        return format('compacted: segment %s, %s messages', older.number, n);
    end if;

    -- Tombstones that everyone has had time to see. Those of their keys before them are gone by now.
    for part in
        select s.* from weir.segment as s
        where s.topic_id = of_topic.id and s.sealed_at is not null and s.emptied_at is null and s.compared >= s.number
          and (needed is null or s.high - 1 <= needed)
        order by s.high
    loop
        execute format('delete from weir.log_%s_%s where payload is null and produced_at < $1', of_topic.id, part.number)
        using clock_timestamp() - of_topic.tombstone_ttl;
        get diagnostics n = row_count;
        if n > 0 then
            update weir.segment as s
            set removed = s.removed + n, messages = greatest(s.messages - n, 0)
            where s.topic_id = of_topic.id and s.number = part.number;
            return format('compacted: segment %s, %s tombstones', part.number, n);
        end if;
    end loop;
    return null;
end
$$;

-- weir.rewrite_segment(part): writes a segment anew that has lost most of its messages: nothing is inserted there any more, so that
-- what they left would never be used again. Vacuum frees it only at a table's end.
--
-- By CLUSTER, which keeps what older snapshots see. After TRUNCATE and INSERT a transaction at REPEATABLE READ would find the segment
-- empty, and pass its group's cursor over it.
create or replace function weir.rewrite_segment(part weir.segment) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
    part_name text := format('weir.log_%s_%s', part.topic_id, part.number);
begin
    execute format('cluster %s using log_%s_%s_pk', part_name, part.topic_id, part.number);
    execute format('analyze %s', part_name);
    update weir.segment as s
    set removed = 0,
        messages = (select greatest(c.reltuples, 0) from pg_class as c where c.oid = part_name::regclass),
        bytes = pg_total_relation_size(part_name::regclass)
    where s.topic_id = part.topic_id and s.number = part.number;
end
$$;

-- weir.current(topic, key): the latest message of a key in a compacted topic; no row where there is none, or it is a tombstone.
--
-- It sees what this transaction sees, also what is not settled yet. Errors: WE001, WE003 (the topic is not compacted).
-- Index: (key, id) of each segment, from the newest on.
create or replace function weir.current(topic text, key text)
returns table (id bigint, headers jsonb, payload json, data bytea, produced_at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    -- "current" is no qualifier in every place of SQL, so the arguments go by names of their own.
    of_topic weir.topic := weir.topic_named($1);
    wanted text := $2;
    part record;
    found_id bigint;
begin
    perform weir.check_right(of_topic, 'SELECT');
    if not of_topic.compact then
        raise exception 'topic % is not compacted', quote_literal(of_topic.name)
            using errcode = 'WE003', hint = 'Only a topic that was created with the option compact has an index on its keys.';
    end if;
    perform weir.keep_segments(of_topic.id);
    for part in
        select s.number from weir.segment as s
        where s.topic_id = of_topic.id and s.emptied_at is null
          and (weir.may_look() or to_regclass(format('weir.log_%s_%s', s.topic_id, s.number)) is not null)
        order by s.high desc
    loop
        execute format('select id from weir.log_%s_%s where key = $1 order by id desc limit 1', of_topic.id, part.number)
        into found_id using wanted;
        if found_id is not null then
            return query execute format(
                'select id, headers, %s, produced_at from weir.log_%s_%s where id = $1 and payload is not null',
                case of_topic.format when 'bytes' then 'null::json, payload' when 'jsonb' then 'payload::json, null::bytea' else 'payload, null::bytea' end,
                of_topic.id, part.number)
            using found_id;
            return;
        end if;
    end loop;
end
$$;

-- weir.delete_key(topic, key, after_segment): removes all messages of a key from one segment, for good, and from the deliveries of all
-- groups, dead letters too; with the first segment also those of segments that retention has removed. Returns the segment's number and
-- how many messages of the log, no row when there is no further segment: call it with the number that came before, from 0 on, each
-- time in a transaction of its own, until then.
--
-- It is for what the law wants gone: no group is asked. A log has no index on its keys, so that a segment is read as a whole.
-- Errors: WE001, WE003. Locks: of ordered groups, the shards of deliveries that it removes, and their leases; the rows that it removes.
create or replace function weir.delete_key(topic text, key text, after_segment int default 0)
returns table (segment int, messages bigint)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
#variable_conflict use_column
declare
    of_topic weir.topic := weir.topic_named($1);
    wanted text := $2;
    part weir.segment;
    n bigint;
    from_id bigint;
    each record;
begin
    perform weir.check_primary();
    if wanted is null then
        raise exception 'key must not be null' using errcode = 'WE003', hint = 'Messages without a key cannot be told apart.';
    end if;
    perform weir.keep_segments(of_topic.id);
    select s.* into part
    from weir.segment as s
    where s.topic_id = of_topic.id and s.number > after_segment
    order by s.number
    limit 1;
    if part.number is null then
        return;
    end if;
    execute format('delete from weir.log_%s_%s where key = $1', of_topic.id, part.number) using wanted;
    get diagnostics n = row_count;
    from_id := case
        when exists (select from weir.segment as s where s.topic_id = of_topic.id and s.high <= part.low) then part.low else 0
    end;
    for each in select g.id, g.mode from weir.consumer_group as g where g.topic_id = of_topic.id order by g.id loop
        if each.mode = 'ordered' then
            -- As weir.lock_dead, whatever of the key comes after it goes on.
            perform from weir.shard as s
            where s.group_id = each.id and s.number in (
                select d.shard from weir.delivery as d
                where d.group_id = each.id and d.key = wanted and d.message_id >= from_id and d.message_id < part.high
            )
            order by s.number
            for no key update;
            perform from weir.lease as l
            where l.group_id = each.id and l.shard in (
                select d.shard from weir.delivery as d
                where d.group_id = each.id and d.key = wanted and d.message_id >= from_id and d.message_id < part.high
            )
            order by l.shard
            for update;
        end if;
        delete from weir.delivery as d
        where d.group_id = each.id and d.key = wanted and d.message_id >= from_id and d.message_id < part.high;
        if found and each.mode = 'ordered' then
            perform weir.order_keys(each.id, array[wanted]);
        end if;
    end loop;
    update weir.segment as s
    set removed = s.removed + n, messages = greatest(s.messages - n, 0)
    where s.topic_id = of_topic.id and s.number = part.number and n > 0;
    return query select part.number, n;
end
$$;
