-- weir.committed(group_id): up to which id a group needs the log no more: all of it is handled, or has a delivery of its own.
--
-- One snapshot decides: a claim moves the cursor and writes its lease in one transaction, so either both are seen or neither.
create or replace function weir.committed(group_id int) returns bigint
language sql stable security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
    select least(
        (select c.claimed from weir.cursor as c where c.group_id = committed.group_id),
        (select min(l.low) from weir.lease as l where l.group_id = committed.group_id),
        (
            select min(x.low)
            from weir.shard as s
            cross join lateral (
                select r.low
                from weir.shard_range as r
                where r.group_id = committed.group_id and r.shard = s.number
                order by r.low
                limit 1
            ) as x
            where s.group_id = committed.group_id
        )
    )
$$;

-- weir.gate(topic_id): the number of the advisory lock between retention and whoever sets a cursor to an earlier position. Taken
-- shared by weir.create_group and weir.seek, before they find the position and until they commit; and alone by weir.retain. Claims
-- only go forward and need it not.
create or replace function weir.gate(topic_id int) returns bigint
language sql immutable
set search_path = pg_catalog, pg_temp
as $$ select hashtextextended('weir.gate', topic_id) $$;
