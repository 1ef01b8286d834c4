-- weir.maintain(): does one piece of the upkeep that is due, in the caller's transaction, and says what. No row: nothing is due, or
-- another transaction is at it, or maintenance is suspended. Call it again until then, each time in a transaction of its own.
--
--   topic    null where it concerns none
--   action   sealed: a segment is full and settled, its size and age are noted, it is analyzed
--            rolled: the rest of a segment's ids was skipped, so that it can be retained by age
--            extended: a segment was made ahead of need
--            emptied: the messages of a segment were removed by retention; dropped: its table
--            compacted: messages that later ones of their key replace were removed; rewritten: the space they left was freed
--            expired: idempotency keys and producers that are past their time were forgotten
--            squeezed: a hot table was written anew, since an old snapshot keeps vacuum from it
--            analyzed: the log as a whole
--            postponed: a lock was not to be had within a moment; nothing else is due
--
-- Any number of processes may call it: one at a time works, the others find nothing due. What is not due is found out without
-- writing anything. No lock that a producer or consumer could wait for is held, or waited for, longer than a moment.
--
-- READ COMMITTED only: what a group needs is looked at again once nobody can change it, which the snapshot of a longer
-- transaction would not show.
--
-- Errors: WE003 (another isolation level). Locks: an advisory lock of the install, never waited for; those of the piece of work.
create or replace function weir.maintain() returns table (topic text, action text, detail text)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    each weir.topic;
    done text;
    postponed text;
    was_timeout text := current_setting('lock_timeout');
begin
    if not weir.may_look() then
        raise exception 'maintenance needs READ COMMITTED, this transaction is at %', upper(current_setting('transaction_isolation'))
            using errcode = 'WE003', hint = 'Begin it with: begin isolation level read committed.';
    end if;
    if pg_is_in_recovery() or exists (select from weir.maintenance as m where m.suspended_at is not null)
        or not pg_try_advisory_xact_lock(hashtextextended('weir.maintain', 0))
    then
        return;
    end if;
    perform set_config('lock_timeout', '50ms', true);
    -- In random order, so that a topic whose turn never comes off does not keep the others waiting.
    for each in select t.* from weir.topic as t where t.id in (select d from weir.topics_due() as d) order by random() loop
        for step in 1..7 loop
            exit when step > 1 and each.dropped_at is not null;
            begin
                done := case step
                    when 1 then weir.finish_drop(each)
                    when 2 then weir.extend_ahead(each)
                    when 3 then weir.seal(each)
                    when 4 then weir.retain(each)
                    when 5 then weir.drop_emptied(each)
                    when 6 then weir.roll(each)
                    when 7 then weir.compact(each)
                end;
            exception
                when lock_not_available then
                    postponed := coalesce(postponed, each.name);
                    done := null;
                when undefined_table then
                    -- Dropped since it was listed: another time, if it is still there.
                    if exists (select from weir.topic as t where t.id = each.id and t.dropped_at is null) then
                        raise;
                    end if;
                    exit;
            end;
            if done is not null then
                perform set_config('lock_timeout', was_timeout, true);
                return query select each.name, split_part(done, ': ', 1), split_part(done, ': ', 2);
                return;
            end if;
        end loop;
    end loop;
    begin
        done := coalesce(weir.expire(), weir.squeeze());
    exception
        when lock_not_available then
            postponed := coalesce(postponed, '');
            done := null;
    end;
    perform set_config('lock_timeout', was_timeout, true);
    if done is not null then
        return query select null::text, split_part(done, ': ', 1), split_part(done, ': ', 2);
    elsif postponed is not null then
        return query select nullif(postponed, ''), 'postponed', 'a transaction holds a lock that is in the way';
    end if;
end
$$;

-- weir.topics_due(): the topics that may have upkeep due. What it costs is what an idle install costs.
--
-- The sequences are read in a subtransaction that is rolled back, two hundred at a time: their locks would be more than the server has
-- room for when there are thousands of topics. (pg_sequence_last_value() would keep them all the same.)
create or replace function weir.topics_due() returns setof int
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    at_id int := 0;
    ids int[];
    drawn bigint[];
    due int[];
begin
    loop
        ids := array(select t.id from weir.topic as t where t.id > at_id order by t.id limit 200);
        exit when ids = '{}';
        at_id := ids[cardinality(ids)];
        begin
            execute (
                select format('select array_agg(id), array_agg(drawn) from (%s) as q', string_agg(
                    format('select %1$s as id, case when is_called then last_value else 0 end as drawn from weir.log_%1$s_id', i),
                    ' union all '))
                from unnest(ids) as i
            )
            into ids, drawn;
            due := array(
                select t.id
                from unnest(ids, drawn) as q (id, drawn)
                join weir.topic as t on t.id = q.id
                cross join lateral (
                    select s.low from weir.segment as s where s.topic_id = t.id order by s.high desc limit 1
                ) as last
                left join lateral (
                    select s.* from weir.segment as s where s.topic_id = t.id and s.emptied_at is null order by s.high limit 1
                ) as oldest on true
                left join lateral (
                    select s.* from weir.segment as s where s.topic_id = t.id and s.sealed_at is null order by s.high limit 1
                ) as open on true
                where q.drawn >= last.low
                  or q.drawn >= open.high - 1
                  -- No message is older than its segment.
                  or q.drawn >= open.low and open.created_at < clock_timestamp() - t.retention_age / 4
                  or oldest.sealed_at is not null and (
                      t.compact or t.retention_bytes is not null or oldest.messages = 0
                      or oldest.last_at < clock_timestamp() - t.retention_age
                      or (
                          select count(*) from weir.segment as s where s.topic_id = t.id and s.sealed_at is not null
                      ) between greatest(2 * t.analyzed, 1) and 32
                  )
                  or exists (select from weir.segment as s where s.topic_id = t.id and s.emptied_at < clock_timestamp() - interval '1 s')
            );
            raise exception using errcode = 'P0099';
        exception
            when sqlstate 'P0099' then null;
            -- A sequence is being altered or dropped: look at each by itself.
            when lock_not_available or undefined_table then due := ids;
        end;
        return query select unnest(due);
        return query select t.id from weir.topic as t where t.id = any (ids) and t.dropped_at is not null and t.id <> all (due);
    end loop;
end
$$;

-- weir.suspend_maintenance(suspend): stops maintenance by all processes, or lets it go on; returns whether that is new.
create or replace function weir.suspend_maintenance(suspend boolean default true) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform weir.check_primary();
    update weir.maintenance as m
    set suspended_at = case when suspend then clock_timestamp() end
    where (m.suspended_at is not null) <> suspend;
    return found;
end
$$;

-- weir.maintenance_suspended(): since when maintenance is suspended, null when it is not.
create or replace function weir.maintenance_suspended() returns timestamptz
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$ select m.suspended_at from weir.maintenance as m $$;

-- weir.expire(): forgets what is past its time, ten thousand rows at a time.
create or replace function weir.expire() returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    n int;
    m int;
begin
    if exists (select from weir.idempotency as i where i.expires_at < clock_timestamp()) then
        delete from weir.idempotency as i
        where (i.topic_id, i.key) in (
            select x.topic_id, x.key from weir.idempotency as x where x.expires_at < clock_timestamp()
            order by x.expires_at limit 10000 for update skip locked
        );
        get diagnostics n = row_count;
    end if;
    -- A retry that comes a week late would be stored twice.
    if exists (select from weir.producer as p where p.at < clock_timestamp() - interval '7 days') then
        delete from weir.producer as p where p.id in (
            select x.id from weir.producer as x where x.at < clock_timestamp() - interval '7 days' limit 10000 for update skip locked
        );
        get diagnostics m = row_count;
    end if;
    if n > 0 or m > 0 then
        return format('expired: %s idempotency keys, %s producers', coalesce(n, 0), coalesce(m, 0));
    end if;
    return null;
end
$$;

-- weir.squeeze(): writes a hot table anew whose dead rows vacuum cannot remove, since a snapshot from before is still held.
--
-- The tables have a few live rows that change all the time, so that every look-up would pass by ever more dead versions. TRUNCATE
-- gives the table a new file whatever snapshots there are. Those see it empty from then on. So weir.cursor is always among what is
-- written anew: a transaction at REPEATABLE READ that began before gets a serialization failure at its next call (weir.group_named), as
-- it would from the row itself, which has changed; with its cursor but without the pending ranges of its shards, it would take later
-- messages of a key first.
--
-- Locks: ACCESS EXCLUSIVE on the tables for as long as a few rows take to copy.
create or replace function weir.squeeze() returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
    hot text;
    anew text;
    pages bigint;
    kept bigint;
begin
    foreach hot in array array['fence', 'cursor', 'lease', 'shard_range', 'producer', 'delivery'] loop
        select pg_relation_size(format('weir.%I', hot)::regclass) / current_setting('block_size')::int into pages;
        -- What vacuum can remove is left to it. A role that may not see what others do goes by the size.
        continue when pages < 16 or pages < 1024 and not exists (
            select from pg_stat_activity as a
            where a.backend_xmin is not null and a.xact_start < clock_timestamp() - interval '20 s'
            union all
            select from pg_prepared_xacts as x where x.prepared < clock_timestamp() - interval '20 s'
            union all
            select from pg_replication_slots as r where r.xmin is not null
        );
        execute format('select count(*) from (select from weir.%I limit $1) as few', hot) into kept using pages * 4;
        -- Written anew it would have at most a quarter of the pages, by a row of a hundred bytes, or of a thousand for deliveries.
        continue when kept * case when hot = 'delivery' then 1000 else 100 end * 4 > pages * 8192;
        foreach anew in array array(select distinct x from unnest(array[hot, 'cursor']) as x order by x desc) loop
            execute format('lock table weir.%I in access exclusive mode', anew);
            -- No temporary table: that takes a privilege of the database, and its name would be the caller's to take first.
            execute format('create unlogged table weir.squeezed as select * from weir.%I', anew);
            execute format('truncate weir.%I', anew);
            execute format('insert into weir.%I select * from weir.squeezed', anew);
            drop table weir.squeezed;
        end loop;
        return format('squeezed: %s, %s pages', hot, pages);
    end loop;
    return null;
end
$$;
