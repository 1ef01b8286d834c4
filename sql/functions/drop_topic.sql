-- weir.drop_topic(topic, force): removes a topic with its messages, groups and dead letters. Returns whether there was one.
--
-- force  also when it is live: a consumer of it runs, or holds something
--
-- The topic and its groups are gone at once, and the name is free. The tables are dropped with it where that takes no waiting, else by
-- maintenance, some at a time: a slow reader, a producer that is still open or thousands of segments do not hold it up, and an
-- interruption does not either. Producers and consumers get WE001 at their next call.
-- Errors: WE012 (it is live). Locks: the topic's row and its groups'; ACCESS EXCLUSIVE on the log where that is to be had within a moment.
create or replace function weir.drop_topic(topic text, force boolean default false) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    dropped weir.topic;
    was_timeout text := current_setting('lock_timeout');
begin
    perform weir.check_primary();
    select t.* into dropped from weir.topic as t where t.name = drop_topic.topic for no key update;
    if dropped.id is null then
        return false;
    end if;
    if not force then
        perform weir.refuse_live(g) from weir.consumer_group as g where g.topic_id = dropped.id order by g.id;
    end if;
    perform weir.drop_group(topic, g.name, true) from weir.consumer_group as g where g.topic_id = dropped.id order by g.id;
    -- No topic can be given such a name: it begins with a space.
    update weir.topic as t
    set name = format(' dropped %s', t.id), dropped_at = clock_timestamp()
    where t.id = dropped.id
    returning * into dropped;
    begin
        perform set_config('lock_timeout', '50ms', true);
        perform weir.finish_drop(dropped);
    exception
        when lock_not_available then null; -- weir.maintain() goes on with it
    end;
    perform set_config('lock_timeout', was_timeout, true);
    return true;
end
$$;

-- weir.finish_drop(of_topic): drops tables of a topic that was dropped, twenty segments at a time, as many locks as a transaction can
-- well have. Returns what it did, null for nothing.
create or replace function weir.finish_drop(of_topic weir.topic) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    part record;
    left_over bigint;
begin
    if of_topic.dropped_at is null then
        return null;
    end if;
    execute format('lock table only weir.log_%s in access exclusive mode', of_topic.id);
    -- Made by a call that had read the topic's old name.
    perform weir.drop_group(of_topic.name, g.name, true) from weir.consumer_group as g where g.topic_id = of_topic.id order by g.id;
    for part in
        select s.number from weir.segment as s where s.topic_id = of_topic.id order by s.number limit 20
    loop
        execute format('drop table weir.log_%s_%s', of_topic.id, part.number);
        delete from weir.segment as s where s.topic_id = of_topic.id and s.number = part.number;
    end loop;
    select count(*) into left_over from weir.segment as s where s.topic_id = of_topic.id;
    if left_over > 0 then
        return format('dropped: %s segments are left', left_over);
    end if;
    execute format('drop function if exists weir.log_%s_insert', of_topic.id);
    execute format('drop table weir.log_%s', of_topic.id);
    delete from weir.idempotency as i where i.topic_id = of_topic.id;
    delete from weir.fence as f where f.topic_id = of_topic.id;
    delete from weir.topic as t where t.id = of_topic.id;
    return 'dropped: the topic';
end
$$;
