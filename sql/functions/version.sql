-- weir.version(): the number of the last schema step that was run, and the lowest library version that can work with it.
create or replace function weir.version() returns table (version int, compatible int, functions text)
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$ select m.version, m.compatible, m.functions from weir.meta as m $$;
