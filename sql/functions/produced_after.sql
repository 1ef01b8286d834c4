-- weir.produced_after(topic_id, id): when the first visible message above that id was produced; null if there is none.
create or replace function weir.produced_after(topic_id int, id bigint) returns timestamptz
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    part record;
    at_time timestamptz;
begin
    for part in
        select s.number
        from weir.segment as s
        where s.topic_id = produced_after.topic_id and s.high > produced_after.id + 1 and s.emptied_at is null
        order by s.high
    loop
        execute format('select produced_at from weir.log_%s_%s where id > $1 order by id limit 1', topic_id, part.number)
        into at_time using produced_after.id;
        exit when at_time is not null;
    end loop;
    return at_time;
end
$$;
