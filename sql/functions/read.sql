-- weir.read(topic, after, max_messages): messages in id order, without a group: those with an id greater than after, never
-- past the settled head. Call it again with the last id for more.
--
-- max_messages: 1 to 10,000. Works on a standby, up to the settled head that has arrived there.
-- Errors: WE001, WE003, 42501 (the topic is restricted). Index: the segment's primary key.
create or replace function weir.read(topic text, after bigint, max_messages int default 100)
returns table (id bigint, key text, headers jsonb, payload json, data bytea, produced_at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
    from_topic weir.topic := weir.topic_named(topic);
    settled bigint;
    part record;
    given int;
begin
    perform weir.check_right(from_topic, 'SELECT');
    perform weir.check_range('after', after, 0, 9223372036854775807);
    perform weir.check_range('max_messages', max_messages, 1, 10000);
    -- Reading moves the fence only when it has come to its end.
    select max(r.bound) into settled from weir.fence_rows as r where r.topic_id = from_topic.id;
    if after >= settled then
        settled := weir.settled_head(from_topic.id);
    end if;
    for part in
        select s.number
        from weir.segment as s
        where s.topic_id = from_topic.id and s.high > after + 1 and s.low <= settled and s.emptied_at is null
        order by s.high
    loop
        return query execute format(
            'select id, key, headers, %s, produced_at from weir.log_%s_%s where id > $1 and id <= $2 order by id limit $3',
            case from_topic.format when 'bytes' then 'null::json, payload' when 'jsonb' then 'payload::json, null::bytea' else 'payload, null::bytea' end,
            from_topic.id, part.number)
        using after, settled, max_messages;
        get diagnostics given = row_count;
        max_messages := max_messages - given;
        exit when max_messages = 0;
    end loop;
end
$$;
