-- weir.rename_group(topic, grp, new_name): gives a group another name. Its position, leases and deliveries stay; consumers that run under
-- the old name get WE002 at their next call. Errors: WE001, WE002, WE003, WE004 (the new name is another group's), WE006.
create or replace function weir.rename_group(topic text, grp text, new_name text) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    of_group weir.consumer_group := weir.group_named(topic, grp);
begin
    perform weir.check_primary();
    perform weir.check_name('new_name', new_name);
    update weir.consumer_group as g set name = new_name where g.id = of_group.id;
exception
    when unique_violation then
        raise exception 'group % exists on topic %', quote_literal(new_name), quote_literal(topic)
            using errcode = 'WE004', hint = 'Choose another name, or drop that group first.';
end
$$;
