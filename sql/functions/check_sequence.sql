-- weir.check_sequence(topic_id): refuses, with WE008, to go on with a sequence that does not hand out ids in rising order
-- one by one: with CACHE > 1 a session draws lower ids later than another drew higher ones, and messages are skipped.
-- Refuses, with WE007, a sequence that stands below the settled head: it would issue ids again that groups are past.
create or replace function weir.check_sequence(topic_id int, settled bigint, drawn bigint) returns void
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    seq text := format('weir.log_%s_id', check_sequence.topic_id);
    found_sequence pg_sequence;
begin
    select s.* into found_sequence from pg_sequence as s where s.seqrelid = seq::regclass;
    if found_sequence.seqcache <> 1 or found_sequence.seqcycle or found_sequence.seqincrement <> 1 then
        raise exception 'sequence % has cache %, increment %, cycle %: its ids do not rise one by one',
            seq, found_sequence.seqcache, found_sequence.seqincrement, found_sequence.seqcycle
            using errcode = 'WE008',
                  detail = 'Messages could appear below the settled head and be skipped.',
                  hint = format('Run: alter sequence %s increment 1 cache 1 no cycle; then reconnect every producer.', seq);
    end if;
    if drawn < settled then
        raise exception 'sequence % stands at %, below the settled head %: it would issue ids again', seq, drawn, settled
            using errcode = 'WE007',
                  detail = 'This happens where tables were copied or replicated without their sequences.',
                  hint = format('Run: select setval(%L, %s);', seq, settled);
    end if;
end
$$;
