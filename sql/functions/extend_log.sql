-- weir.extend_log(topic_id, need): makes segments until the log can hold the id need, and as many ids again as one
-- segment holds.
--
-- A new segment is made as a table of its own and then attached: ATTACH PARTITION takes SHARE UPDATE EXCLUSIVE on the log,
-- which neither readers nor producers wait for. Its id default is a copy of the log's, so that a row written straight
-- into a segment is as safe as one written to the log.
--
-- wait = false returns at once when another transaction is at it.
-- Locks: an advisory lock of the topic, then SHARE UPDATE EXCLUSIVE on the log, until the transaction ends.
create or replace function weir.extend_log(topic_id int, need bigint, wait boolean default true) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    gate bigint := hashtextextended('weir.extend_log', extend_log.topic_id);
    size bigint;
    last record;
begin
    if extend_log.wait then
        perform pg_advisory_xact_lock(gate);
    elsif not pg_try_advisory_xact_lock(gate) then
        return;
    end if;
    select t.segment_size into size from weir.topic as t where t.id = extend_log.topic_id;
    loop
        select coalesce(max(s.number), 0) as number, coalesce(max(s.high), 1) as high
        into last
        from weir.segment as s
        where s.topic_id = extend_log.topic_id;
        exit when last.high > need + size;
        -- Made already by a transaction that this one's snapshot (REPEATABLE READ) does not show.
        exit when to_regclass(format('weir.log_%s_%s', topic_id, last.number + 1)) is not null;
        execute format(
            'create table weir.log_%1$s_%2$s (like weir.log_%1$s including defaults including constraints including storage)',
            topic_id, last.number + 1);
        execute format(
            'alter table weir.log_%1$s_%2$s add constraint log_%1$s_%2$s_pk primary key (id)',
            topic_id, last.number + 1);
        execute format(
            'alter table weir.log_%1$s attach partition weir.log_%1$s_%2$s for values from (%3$s) to (%4$s)',
            topic_id, last.number + 1, last.high, last.high + size);
        insert into weir.segment (topic_id, number, low, high)
        values (extend_log.topic_id, last.number + 1, last.high, last.high + size);
    end loop;
end
$$;
