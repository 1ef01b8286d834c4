-- weir.drop_group(topic, grp): removes a group with its cursor, leases, retries and dead letters. Returns whether there was
-- one. Running consumers get WE002 at their next call. Errors: WE001. Locks: the group's rows.
create or replace function weir.drop_group(topic text, grp text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    on_topic weir.topic := weir.topic_named(topic);
    dropped int;
begin
    perform weir.check_primary();
    select g.id into dropped
    from weir.consumer_group as g
    where g.topic_id = on_topic.id and g.name = grp
    for update;
    if dropped is null then
        return false;
    end if;
    -- Leases before the cursor, as in weir.poll; again after it, for what was claimed meanwhile. Later claims wait for the
    -- cursor and then find it gone.
    for turn in 1..2 loop
        perform weir.end_leases(dropped);
        delete from weir.delivery as d where d.group_id = dropped;
        delete from weir.cursor as c where c.group_id = dropped;
    end loop;
    delete from weir.shard as s where s.group_id = dropped;
    delete from weir.consumer as c where c.group_id = dropped;
    delete from weir.consumer_group as g where g.id = dropped;
    return true;
end
$$;
