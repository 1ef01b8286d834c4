-- weir.extend_log(topic_id, need): makes segments until the log can hold the id need and none of its ids is in the last segment.
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
    of_topic weir.topic;
    size bigint;
    last record;
    made regclass;
begin
    if extend_log.wait then
        perform pg_advisory_xact_lock(gate);
    elsif not pg_try_advisory_xact_lock(gate) then
        return;
    end if;
    -- Before any name is looked up: a lock is when a session hears of tables that others have made.
    execute format('lock table only weir.log_%s in share update exclusive mode', topic_id);
    select t.* into of_topic from weir.topic as t where t.id = extend_log.topic_id;
    loop
        select s.number, s.low, s.high
        into last
        from weir.segment as s
        where s.topic_id = extend_log.topic_id
        order by s.high desc
        limit 1;
        exit when last.low > need;
        last.number := coalesce(last.number, 0) + 1;
        last.high := coalesce(last.high, 1);
        -- Made already by a transaction that this one's snapshot (REPEATABLE READ) does not show: what it holds is asked of the
        -- catalogue, which is read as it is now.
        loop
            made := to_regclass(format('weir.log_%s_%s', topic_id, last.number));
            exit when made is null;
            last.low := last.high;
            last.high := (regexp_match(pg_get_partition_constraintdef(made), '< ''(\d+)'''))[1]::bigint;
            last.number := last.number + 1;
        end loop;
        exit when last.low > need;
        size := weir.next_size(of_topic, need);
        execute format(
            'create table weir.log_%1$s_%2$s (like weir.log_%1$s including defaults including constraints including storage)',
            topic_id, last.number);
        execute format(
            'alter table weir.log_%1$s_%2$s add constraint log_%1$s_%2$s_pk primary key (id)',
            topic_id, last.number);
        execute format(
            'alter table weir.log_%1$s attach partition weir.log_%1$s_%2$s for values from (%3$s) to (%4$s)',
            topic_id, last.number, last.high, last.high + size);
        insert into weir.segment (topic_id, number, low, high)
        values (extend_log.topic_id, last.number, last.high, last.high + size);
    end loop;
end
$$;

-- weir.next_size(of_topic, drawn): how many ids the next segment is to hold: those of an eighth of the topic's retention at the pace of
-- late, so that retention by age removes a slow topic's segments too; 10,000 at least, segment_size at most, and segment_size where
-- nothing is retained by age.
create or replace function weir.next_size(of_topic weir.topic, drawn bigint) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    since record;
begin
    if of_topic.retention_age is null then
        return of_topic.segment_size;
    end if;
    -- The third last segment: its ids and those after it were drawn since it was made, or soon after.
    select s.low, s.created_at into since
    from (
        select x.low, x.created_at from weir.segment as x where x.topic_id = of_topic.id order by x.high desc limit 3
    ) as s
    order by s.low
    limit 1;
    if since.low is null then
        return least(10000, of_topic.segment_size);
    end if;
    return least(
        of_topic.segment_size,
        greatest(
            10000,
            (greatest(drawn - since.low, 0) / greatest(extract(epoch from clock_timestamp() - since.created_at), 0.001)
                * extract(epoch from of_topic.retention_age) / 8)::bigint
        )
    );
end
$$;
