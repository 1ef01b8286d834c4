-- weir.head(topic_id, above): the highest visible id of a topic that is greater than above, null if there is none.
--
-- It probes one index in the segment of the sequence's last value and goes down from there only while segments are empty,
-- so its cost does not depend on how many segments there are. It reads the highest visible id because last_value is no
-- upper bound of the ids drawn: nextval() writes a value up to 32 ahead into the shared page before the real one.
--
-- Locks: none beyond those of a select. Index: the segment's primary key.
create or replace function weir.head(topic_id int, above bigint) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    drawn bigint;
    part record;
    found_id bigint;
begin
    drawn := weir.drawn(head.topic_id);
    for part in
        select s.number
        from weir.segment as s
        where s.topic_id = head.topic_id and s.low <= drawn and s.high > head.above and s.emptied_at is null
        order by s.high desc
    loop
        execute format('select id from weir.log_%s_%s where id > $1 order by id desc limit 1', head.topic_id, part.number)
        into found_id using head.above;
        if found_id is not null then
            return found_id;
        end if;
    end loop;
    return null;
end
$$;

-- weir.drawn(topic_id): the sequence's last value, 0 while it has given out nothing. Up to 32 too high for a moment; never too
-- low.
create or replace function weir.drawn(topic_id int) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    last_value bigint;
begin
    execute format('select case when is_called then last_value else 0 end from weir.log_%s_id', topic_id) into last_value;
    return last_value;
end
$$;
