-- weir.redrive(topic, grp, message_id): gives dead messages another life: due at once, attempts counted from none, their
-- errors kept. message_id null: all of the group. Returns how many. Errors: WE001, WE002. Locks: their rows.
create or replace function weir.redrive(topic text, grp text, message_id bigint default null) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    of_group weir.consumer_group := weir.group_named(topic, grp);
    changed bigint;
begin
    perform weir.check_primary();
    update weir.delivery as d
    set state = 'ready', due_at = clock_timestamp(), attempt = 0
    where d.group_id = of_group.id and d.state = 'dead' and d.message_id = coalesce(redrive.message_id, d.message_id);
    get diagnostics changed = row_count;
    return changed;
end
$$;

-- weir.purge(topic, grp, message_id): removes dead messages for good. message_id null: all of the group. Returns how many.
-- The log keeps its copy. Errors: WE001, WE002. Locks: their rows.
create or replace function weir.purge(topic text, grp text, message_id bigint default null) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    of_group weir.consumer_group := weir.group_named(topic, grp);
    changed bigint;
begin
    perform weir.check_primary();
    delete from weir.delivery as d
    where d.group_id = of_group.id and d.state = 'dead' and d.message_id = coalesce(purge.message_id, d.message_id);
    get diagnostics changed = row_count;
    return changed;
end
$$;
