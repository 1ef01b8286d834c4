-- weir.check_sequence(topic_id, settled, drawn, again): refuses, with WE008, to go on with a sequence that does not hand out ids in
-- rising order one by one: with CACHE > 1 a session draws lower ids later than another drew higher ones, and messages are skipped.
-- Refuses, with WE007, a sequence that stands, at drawn, below an id that was given out: it would issue ids again that
-- groups are past.
--
-- settled  the settled head, or the highest id that the fence knows of (weir.fence_rows.reached), or 1 for a look into the log
-- drawn    where the sequence stands, read after the snapshot of the calling statement
-- again    read it once more, where the log is looked into; false where drawn is not where it stands, but an id that came of it
create or replace function weir.check_sequence(topic_id int, settled bigint, drawn bigint, again boolean default true)
returns void
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    seq text := format('weir.log_%s_id', check_sequence.topic_id);
    found_sequence pg_sequence;
    repair text;
begin
    select s.* into found_sequence from pg_sequence as s where s.seqrelid = seq::regclass;
    if found_sequence.seqcache <> 1 or found_sequence.seqcycle or found_sequence.seqincrement <> 1 then
        raise exception 'sequence % has cache %, increment %, cycle %: its ids do not rise one by one',
            seq, found_sequence.seqcache, found_sequence.seqincrement, found_sequence.seqcycle
            using errcode = 'WE008',
                  detail = 'Messages could appear below the settled head and be skipped.',
                  hint = format('Run: alter sequence %s increment 1 cache 1 no cycle; then reconnect every producer.', seq);
    end if;
    if settled > drawn then
        -- What counts is what is settled, and what is in the log. A pair of another cluster, whose messages are not here,
        -- counts for nothing; messages count also where no fence has seen them, or produce would fail on their ids.
        execute format(
            'select greatest((select max(r.bound) from weir.fence_rows as r where r.topic_id = $1), max(l.id)) from weir.log_%s as l',
            topic_id)
        into settled using topic_id;
        -- Those that begin at the same time as this one, on a new topic, are in the log by now.
        if again then
            drawn := greatest(drawn, weir.drawn(topic_id));
        end if;
    end if;
    if drawn < settled then
        -- Where one sequence was left behind the others may have been. A lease number that is issued again would let
        -- whoever had it before acknowledge what another holds.
        select string_agg(format('setval(%L, %s)', r.name, r.value), ', ' order by r.place)
        into repair
        from (
            select 1 as place, seq as name, settled as value
            union all
            select 2, 'weir.lease_id', 1000000 + greatest(
                q.last_value, (select max(l.id) from weir.lease as l), (select max(d.lease_id) from weir.delivery as d)
            )
            from weir.lease_id as q
            union all
            select 3, pg_get_serial_sequence('weir.topic', 'id'), max(t.id)
            from weir.topic as t
            having max(t.id) > coalesce(pg_sequence_last_value(pg_get_serial_sequence('weir.topic', 'id')::regclass), 0)
            union all
            select 4, pg_get_serial_sequence('weir.consumer_group', 'id'), max(g.id)
            from weir.consumer_group as g
            having max(g.id) > coalesce(pg_sequence_last_value(pg_get_serial_sequence('weir.consumer_group', 'id')::regclass), 0)
        ) as r;
        raise exception 'sequence % stands at %, below id %, which was given out already: it would issue ids again', seq, drawn, settled
            using errcode = 'WE007',
                  detail = 'This happens where tables were copied or replicated without their sequences.',
                  hint = format('Run: select %s;', repair);
    end if;
end
$$;
