-- weir.seek(topic, grp, target): moves a group's cursor; returns where it was.
--
-- target  "beginning", "head", {"id": n} (the next id it gets) or {"time": "2026-01-31T12:00:00Z"}
--
-- Leases end at once: handlers that are running finish, and their acknowledgements are refused. Messages up to the new position that
-- wait for another attempt or for their time still get it; those above it come again from the log. Dead letters stay until the group
-- comes by them again.
-- Errors: WE001, WE002, WE003. Locks: the topic's gate, shared, the group's shards, cursor and leases, until the transaction ends.
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
    -- From here on nothing is removed that the new position needs (weir.retain).
    perform pg_advisory_xact_lock_shared(weir.gate(moved.topic_id));
    new_position := weir.position(moved.topic_id, target, 'target');
    perform weir.end_leases(moved.id);
    select c.claimed into was from weir.cursor as c where c.group_id = moved.id for no key update;
    -- Again after the cursor, for what was claimed meanwhile.
    perform weir.end_leases(moved.id);
    delete from weir.delivery as d where d.group_id = moved.id and d.message_id > new_position and d.state <> 'dead';
    update weir.cursor as c set claimed = new_position where c.group_id = moved.id;
    return was;
end
$$;

-- weir.end_leases(group_id): ends all leases of a group, and what its shards have pending. Leases before the cursor, as in weir.poll.
-- A shard's row first: whoever leases the shard has it.
create or replace function weir.end_leases(group_id int) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
begin
    perform from weir.shard as s where s.group_id = end_leases.group_id order by s.number for update;
    delete from weir.lease as l where l.group_id = end_leases.group_id;
    delete from weir.shard_range as r where r.group_id = end_leases.group_id;
    -- Those of single messages, whose deliveries stay.
    update weir.delivery as d
    set state = 'ready', due_at = clock_timestamp(), attempt = d.attempt - 1, lease_id = null, consumer = null
    where d.group_id = end_leases.group_id and d.state = 'leased';
end
$$;
