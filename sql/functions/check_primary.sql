-- weir.check_primary(): refuses, with WE006, to write on a standby.
create or replace function weir.check_primary() returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if pg_is_in_recovery() then
        raise exception 'this server is a standby: it can be read with weir.read(), but not claimed from or produced to'
            using errcode = 'WE006',
                  detail = 'A standby gives out no transaction ids, so nothing can be written and the fence cannot move.',
                  hint = 'Connect to the primary, for example with target_session_attrs=read-write in the connection string.';
    end if;
end
$$;
