-- weir.seek(topic, grp, target): moves a group's cursor; returns where it was.
--
-- target  "beginning", "head", {"id": n} (the next id it gets) or {"time": "2026-01-31T12:00:00Z"}
--
-- Leases of ranges end at once: handlers that are running finish, and their acknowledgements are refused. Messages that
-- wait for another attempt or are dead stay as they are. Errors: WE001, WE002, WE003.
-- Locks: the group's cursor and leases, until the transaction ends.
create or replace function weir.seek(topic text, grp text, target jsonb) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    moved weir.consumer_group := weir.group_named(topic, grp);
    was bigint;
    new_position bigint;
begin
    perform weir.check_primary();
    new_position := weir.position(moved.topic_id, target, 'target');
    -- Leases before the cursor, as in weir.poll; again after it, for what was claimed meanwhile.
    delete from weir.lease as l where l.group_id = moved.id;
    select c.claimed into was from weir.cursor as c where c.group_id = moved.id for no key update;
    delete from weir.lease as l where l.group_id = moved.id;
    update weir.cursor as c set claimed = new_position where c.group_id = moved.id;
    return was;
end
$$;
