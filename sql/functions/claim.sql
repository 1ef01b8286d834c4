-- weir.claim(topic, grp, consumer, max_messages, lease, max_bytes): takes the next messages of a group.
--
-- consumer      names the holder of the lease; only it can acknowledge. Unique to a process and its life
-- max_messages  1 to 10,000
-- lease         how long the messages stay this consumer's, 100 ms to 1 day, by the server's clock
-- max_bytes     bytes of payload at the most; a single larger message is taken alone
--
-- Returns a row a lease: first messages that are due for another attempt, one a lease (low = id - 1, high = id), then
-- a range (low, high]; of a queue group messages only, one a lease; of an ordered group shards, whose messages, of the range
-- (low, high], are to be handled in the order in which weir.fetch() gives them. No row: there is nothing to take now. Read each with
-- weir.fetch(), then call weir.ack().
--
-- Commit before handling: only then is the claim anyone else's knowledge. In one transaction with fetch and ack the work of the
-- transaction and the progress of the group are one; the group's other claims wait for it meanwhile.
--
-- Errors, locks: as weir.poll.
create or replace function weir.claim(
    topic text, grp text, consumer text, max_messages int default 100, lease interval default '15 s',
    max_bytes bigint default 4194304
)
returns table (lease_id bigint, low bigint, high bigint, attempt int)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    if max_messages is null or max_messages < 1 then
        perform weir.check_range('max_messages', max_messages, 1, 10000);
    end if;
    return query
    select p.lease_id, p.low, p.high, p.attempt
    from weir.poll(topic, grp, consumer, max_messages, lease, max_bytes, null, false) as p
    where p.lease_id is not null;
end
$$;
