-- weir.next_range(of_group, format, settled, max_messages, max_bytes, wait): moves a group's cursor over its next messages, at
-- most to settled.
--
-- settled       must have been proven in an earlier statement
-- wait          false: when another transaction holds the cursor, there is nothing
--
-- Returns the range (low, high], which is in one segment, so that its messages are read straight from one plain table; how
-- many messages of the group it has, and how many bytes; whether some have a deliver_at. low is null when there were
-- none; more then tells that they were looked for only up to a point.
--
-- A gap of ids is passed in one step a segment. What a group's filter leaves out is passed at most filter_step rows at a
-- time and filter_steps times in a call, so that a filter that fits nothing bounds the call all the same.
--
-- Locks: the group's cursor, until the transaction ends; this is what makes claims disjoint. Index: the segment's primary key.
create or replace function weir.next_range(
    of_group weir.consumer_group, format text, settled bigint, max_messages int, max_bytes bigint, wait boolean,
    out low bigint, out high bigint, out segment int, out messages int, out bytes bigint, out delayed boolean, out more boolean
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
    filter_step constant int := 20000;
    filter_steps int := 10;
    filtered constant boolean := of_group.key_prefix is not null or of_group.header_match is not null;
    position bigint;
    start bigint;
    until_id bigint;
    part record;
    source text;
    scanned int;
    last_id bigint;
begin
    if wait then
        select c.claimed into position from weir.cursor as c where c.group_id = of_group.id for no key update;
    else
        select c.claimed into position from weir.cursor as c where c.group_id = of_group.id for no key update skip locked;
    end if;
    start := position;
    more := false;
    while position < settled loop
        select s.number, s.low, s.high into part
        from weir.segment as s
        where s.topic_id = of_group.topic_id and s.high > position + 1 and s.emptied_at is null
        order by s.high
        limit 1;
        exit when part.number is null;
        -- A segment may begin above the cursor, where older ones were dropped.
        position := greatest(position, part.low - 1);
        until_id := least(settled, part.high - 1);
        if filtered then
            if filter_steps = 0 then
                more := true;
                exit;
            end if;
            filter_steps := filter_steps - 1;
            execute format(
                'select id from weir.log_%s_%s where id > $1 and id <= $2 order by id offset $3 limit 1', of_group.topic_id, part.number)
            into last_id using position, until_id, filter_step - 1;
            until_id := coalesce(last_id, until_id);
        end if;
        source := format(
            'select id, %s as bytes, deliver_at is not null as delayed
             from weir.log_%s_%s
             where id > $1 and id <= $2%s
             order by id
             limit $3',
            weir.size_sql(format), of_group.topic_id, part.number, weir.filter_sql(of_group));
        execute format(
            'select count(*), max(id), sum(bytes), bool_or(delayed) from (%s) as next', source)
        into scanned, last_id, bytes, delayed
        using position, until_id, max_messages, max_bytes, of_group.key_prefix, of_group.header_match;
        messages := scanned;
        if bytes > max_bytes then
            execute format(
                'select count(*) filter (where kept), max(id) filter (where kept), sum(bytes) filter (where kept),
                    bool_or(delayed) filter (where kept)
                 from (
                     select id, bytes, delayed, sum(bytes) over by_id <= $4 or row_number() over by_id = 1 as kept
                     from (%s) as next
                     window by_id as (order by id rows unbounded preceding)
                 ) as weighed', source)
            into messages, last_id, bytes, delayed
            using position, until_id, max_messages, max_bytes, of_group.key_prefix, of_group.header_match;
        end if;
        if messages > 0 then
            low := position;
            high := case when scanned = max_messages or messages < scanned then last_id else until_id end;
            segment := part.number;
            position := high;
            exit;
        end if;
        position := until_id;
    end loop;
    if position > start then
        update weir.cursor as c set claimed = position where c.group_id = of_group.id;
    end if;
end
$$;

-- weir.filter_sql(of_group): the condition that a group's filter puts on a query of its log, of $5 (key_prefix) and $6
-- (header_match). Empty where it has none.
create or replace function weir.filter_sql(of_group weir.consumer_group) returns text
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    return case when of_group.key_prefix is not null then ' and starts_with(key, $5)' else '' end
        || case when of_group.header_match is not null then ' and headers @> $6' else '' end;
end
$$;

-- weir.size_sql(format): the expression for the bytes that the column payload has in a log of that format. That of json and bytea is
-- known without decompressing them, that of jsonb is what it takes on disk.
create or replace function weir.size_sql(format text) returns text
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    return case format when 'jsonb' then 'pg_column_size(payload)' when 'bytes' then 'octet_length(payload)'
        else 'octet_length(payload::text)' end;
end
$$;
