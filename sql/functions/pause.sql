-- weir.pause_group(topic, grp): hands nothing of a group out any more; returns whether that is new. What consumers hold they finish and
-- acknowledge; an expired lease waits. Errors: WE001, WE002, WE006.
create or replace function weir.pause_group(topic text, grp text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    of_group weir.consumer_group := weir.group_named(topic, grp);
begin
    perform weir.check_primary();
    update weir.consumer_group as g set paused_at = clock_timestamp() where g.id = of_group.id and g.paused_at is null;
    return found;
end
$$;

-- weir.resume_group(topic, grp): hands the messages of a paused group out again; returns whether it was paused. Errors: WE001,
-- WE002, WE006.
create or replace function weir.resume_group(topic text, grp text) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    of_group weir.consumer_group := weir.group_named(topic, grp);
begin
    perform weir.check_primary();
    update weir.consumer_group as g set paused_at = null where g.id = of_group.id and g.paused_at is not null;
    return found;
end
$$;
