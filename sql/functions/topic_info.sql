-- weir.topic_info(topic): number, format and log of a topic, once its sequence is found to be in order. Errors: WE001, WE008.
create or replace function weir.topic_info(topic text) returns table (id int, format text, log text)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    found_topic weir.topic := weir.topic_named(topic);
begin
    perform weir.check_sequence(found_topic.id, 0, 0);
    return query select found_topic.id, found_topic.format, format('weir.log_%s', found_topic.id);
end
$$;
