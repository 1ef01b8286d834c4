-- weir.make_insert(of_topic): makes weir.log_N_insert(payloads, keys, headers), which inserts messages into the topic's log and returns
-- their ids in order. keys and headers may be null.
--
-- A statement in it is planned once a session. The same one as text, with the log's name put in, is planned at each call, which took
-- more time than to insert a message.
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
                 select u.key, u.headers, u.payload%3$s
                 from unnest($1, $2, $3) with ordinality as u (payload, key, headers, position)
                 order by u.position
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
