-- weir.make_insert(of_topic): makes weir.log_N_insert(payloads, keys, headers), which inserts messages into the topic's log and returns
-- their ids in order. keys and headers may be null.
--
-- A statement in it is planned once a session. The same one as text, with the log's name put in, is planned at each call, which took
-- more time than to insert a message. unnest in the select list hands on one element of each array after the other, null where an
-- array has ended; in FROM it would make a copy of all payloads first, and an ORDER BY another. Ids are drawn above it, row by row.
create or replace function weir.make_insert(of_topic weir.topic) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    arguments text := format('%s[], text[], jsonb[]', case of_topic.format when 'bytes' then 'bytea' else 'json' end);
begin
    execute format(
        'create or replace function weir.log_%1$s_insert(%2$s) returns bigint[]
         language plpgsql volatile
         set search_path = pg_catalog, pg_temp
         set jit = off
         set plan_cache_mode = force_generic_plan
         as $body$
         declare
             ids bigint[];
         begin
             with stored as (
                 insert into weir.log_%1$s (key, headers, payload)
                 select unnest($2), unnest($3), unnest($1)%3$s
                 returning id
             )
             select array_agg(s.id order by s.id) into ids from stored as s;
             return ids;
         end
         $body$',
        of_topic.id, arguments, case of_topic.format when 'jsonb' then '::jsonb' end);
    execute format('revoke all on function weir.log_%s_insert(%s) from public', of_topic.id, arguments);
end
$$;
