-- weir.topic_named(topic): the topic of that name, or error WE001.
create or replace function weir.topic_named(topic text) returns weir.topic
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    found_topic weir.topic;
begin
    select t.* into found_topic from weir.topic as t where t.name = topic_named.topic;
    if found_topic.id is null then
        raise exception 'topic % does not exist', coalesce(quote_literal(topic), 'null')
            using errcode = 'WE001', hint = 'Create it with weir.create_topic(), or correct the name: weir.topics lists them.';
    end if;
    return found_topic;
end
$$;
