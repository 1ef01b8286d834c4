-- weir.finished(xids): whether none of these transactions is running in the snapshot of the statement that asks.
--
-- STABLE: it must see with that snapshot, and no other. On a standby, which does not know what is running, it says no.
create or replace function weir.finished(xids xid8[]) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    now_snapshot pg_snapshot := pg_current_snapshot();
    x xid8;
begin
    if pg_is_in_recovery() then
        return false;
    end if;
    foreach x in array xids loop
        if not pg_visible_in_snapshot(x, now_snapshot) then
            return false;
        end if;
    end loop;
    return true;
end
$$;
