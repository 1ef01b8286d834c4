-- weir.claimed(): the lease that weir.poll has claimed last in this session, when that was one range; no row for anything else.
--
-- With it one flight over the network claims and brings the messages: begin, weir.poll, commit, and weir.fetch of this. The claim is
-- committed before its first message is sent.
create or replace function weir.claimed() returns setof bigint
language sql stable rows 1
set search_path = pg_catalog, pg_temp
as $$
    select c.lease::bigint
    from (select nullif(current_setting('weir.claimed', true), '') as lease) as c
    where c.lease is not null
$$;
