-- weir.skip_leases(): after a crash of the server, puts the numbers of leases ahead of all that can have been given out before it.
--
-- A claim commits asynchronously. One that a crash has lost is still in the hands of the consumer that got it. Were its number given out
-- again, to a claim of other messages by the same consumer, an acknowledgement of the first would end the second, unhandled.
--
-- Whoever draws a number has seen the row of weir.since_crash, so that the sequence was put ahead before. That commit waits for the disk:
-- a second crash finds the sequence no lower.
-- Locks: an advisory lock, until the transaction ends; it is taken once a crash.
create or replace function weir.skip_leases() returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform pg_advisory_xact_lock(hashtextextended('weir.skip_leases', 0));
    if exists (select from weir.since_crash) then
        return; -- another has done it
    end if;
    -- The setting would be put back at the function's end if it stood in the function's head.
    perform set_config('synchronous_commit', 'local', true);
    perform setval('weir.lease_id', nextval('weir.lease_id') + 10000000);
    insert into weir.since_crash default values;
end
$$;
