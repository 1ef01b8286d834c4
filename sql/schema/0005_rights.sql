-- Schema step 5: each log has its own function that inserts (weir.make_insert); lease numbers are given out once, crashes or not; rights
-- by topic.

drop function if exists weir.producing_to(text, boolean);
drop function if exists weir.store_messages(
    weir.topic, anyarray, text[], jsonb[], timestamptz[], interval[], int[], interval[], text[], boolean
);
drop function if exists weir.write_batch(uuid, bigint, bigint, boolean, text, bigint[]);
drop function if exists weir.check_sequence(int, bigint, bigint);

-- Has a row, unless the server has crashed, or been promoted, since: then it is empty, as is every unlogged table. Claims commit
-- asynchronously, so a crash may have put back weir.lease_id as well (weir.skip_leases).
create unlogged table weir.since_crash (at timestamptz not null default clock_timestamp());
insert into weir.since_crash default values;

-- Whoever produces to it, or reads it, needs a right on its log (weir.check_right).
alter table weir.topic add column restricted boolean not null default false;
