-- weir.delivery_sql(group_id, topic_id, segment, state, due_at, attempt, suspect, shard, errors, condition): the statement that makes
-- deliveries of messages of a segment. From state on, the arguments are expressions over the columns of the log.
--
-- A delivery holds a copy of its message, so that it pins no segment. Where the group, moved back, comes by a message that is
-- dead, its row begins another life; one that is not dead stays as it is.
create or replace function weir.delivery_sql(
    group_id int, topic_id int, segment text, state text, due_at text, attempt text, suspect text, shard text, errors text, condition text
)
returns text
language sql stable security definer
set search_path = pg_catalog, pg_temp
as $$
    select format(
        'insert into weir.delivery as d
            (group_id, message_id, state, due_at, attempt, suspect, shard, errors, priority, timeout, key, headers, produced_at, %s)
         select %s, id, %s, %s, %s, %s, %s, %s, coalesce(priority, 0), timeout, key, headers, produced_at, payload
         from weir.%I
         where %s
         on conflict (group_id, message_id) do update
         set state = excluded.state, due_at = excluded.due_at, attempt = excluded.attempt, suspect = excluded.suspect,
             shard = excluded.shard, errors = d.errors || excluded.errors
         where d.state = ''dead''',
        case t.format when 'bytes' then 'data' else 'payload' end,
        group_id, state, due_at, attempt, suspect, shard, errors, segment, condition)
    from weir.topic as t
    where t.id = topic_id
$$;
