-- weir.group_named(topic, grp): the group of that name on that topic, or error WE001 or WE002.
create or replace function weir.group_named(topic text, grp text) returns weir.consumer_group
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    found_topic weir.topic := weir.topic_named(topic);
    found_group weir.consumer_group;
begin
    select g.* into found_group
    from weir.consumer_group as g
    where g.topic_id = found_topic.id and g.name = group_named.grp;
    if found_group.id is not null and not exists (select from weir.cursor as c where c.group_id = found_group.id)
        and not weir.may_look()
    then
        -- weir.squeeze() has written weir.cursor anew since this transaction's snapshot was taken.
        raise exception 'the cursor of group % has changed since this transaction began', quote_literal(grp)
            using errcode = 'serialization_failure', hint = 'Try the transaction again, or use READ COMMITTED.';
    end if;
    if found_group.id is null or not exists (select from weir.cursor as c where c.group_id = found_group.id) then
        raise exception 'group % does not exist on topic %', coalesce(quote_literal(grp), 'null'), quote_literal(topic)
            using errcode = 'WE002', hint = 'Create it with weir.create_group(), or correct the name: weir.groups lists them.';
    end if;
    return found_group;
end
$$;
