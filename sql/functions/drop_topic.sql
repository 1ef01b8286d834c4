-- weir.drop_topic(topic): removes a topic with its messages, groups and dead letters. Returns whether there was one.
--
-- Locks: ACCESS EXCLUSIVE on the log, so it waits for open transactions that read or wrote it; lock_timeout applies.
create or replace function weir.drop_topic(topic text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    dropped int;
begin
    perform weir.check_primary();
    select t.id into dropped from weir.topic as t where t.name = drop_topic.topic for update;
    if dropped is null then
        return false;
    end if;
    perform weir.drop_group(topic, g.name) from weir.consumer_group as g where g.topic_id = dropped order by g.id;
    execute format('drop table weir.log_%s', dropped);
    delete from weir.segment as s where s.topic_id = dropped;
    delete from weir.fence as f where f.topic_id = dropped;
    delete from weir.topic as t where t.id = dropped;
    return true;
end
$$;
