-- weir.claimed(): the lease that weir.poll has claimed last in this session, when that was one range; no row for anything else.
--
-- With it one flight over the network claims and brings the messages: begin, weir.poll, commit, and weir.fetch of this. The claim is
-- committed before its first message is sent.
create or replace function weir.claimed() returns setof bigint
language plpgsql stable rows 1
set search_path = pg_catalog, pg_temp
as $$
declare
    claimed text := current_setting('weir_session.claimed', true);
begin
    if claimed <> '' then
        return next claimed::bigint;
    end if;
end
$$;
