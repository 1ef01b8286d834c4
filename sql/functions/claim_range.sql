-- weir.claim_range(group_id, topic_id, format, settled, consumer, max_messages, lease, max_bytes): advances the group's
-- cursor over the next messages, at most to settled, and leases them. Returns no row when there were none.
--
-- settled must have been proven in an earlier statement. A range ends with its segment, so that its messages are read
-- straight from one plain table; a gap of ids is passed in one step a segment.
--
-- Locks: the group's cursor, until the transaction ends; this is what makes claims disjoint. Index: the segment's primary key.
create or replace function weir.claim_range(
    group_id int, topic_id int, format text, settled bigint, consumer text, max_messages int, lease interval, max_bytes bigint
)
returns setof weir.lease
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
    position bigint;
    start bigint;
    part record;
    scanned int;
    messages int;
    last_id bigint;
    taken weir.lease;
begin
    select c.claimed into position from weir.cursor as c where c.group_id = claim_range.group_id for no key update;
    start := position;
    while position < settled loop
        select s.number, s.low, s.high into part
        from weir.segment as s
        where s.topic_id = claim_range.topic_id and s.high > position + 1
        order by s.high
        limit 1;
        exit when part.number is null;
        -- A segment may begin above the cursor, where older ones were dropped.
        position := greatest(position, part.low - 1);
        -- The size of json and bytea is known without decompressing them.
        execute format(
            'select count(*) as scanned, count(*) filter (where kept) as messages, max(id) filter (where kept) as last_id
             from (
                 select id, sum(bytes) over by_id <= $4 or row_number() over by_id = 1 as kept
                 from (
                     select id, %s as bytes from weir.log_%s_%s where id > $1 and id <= $2 order by id limit $3
                 ) as next
                 window by_id as (order by id rows unbounded preceding)
             ) as weighed',
            case format when 'jsonb' then 'pg_column_size(payload)' when 'bytes' then 'octet_length(payload)'
                else 'octet_length(payload::text)' end,
            topic_id, part.number)
        into scanned, messages, last_id using position, settled, max_messages, max_bytes;
        if messages > 0 then
            insert into weir.lease (group_id, low, high, consumer, attempt, expires_at)
            values (
                claim_range.group_id, position,
                case when scanned = max_messages or messages < scanned then last_id
                    else least(settled, part.high - 1) end,
                claim_range.consumer, 1, clock_timestamp() + claim_range.lease
            )
            returning * into taken;
            update weir.cursor as c set claimed = taken.high where c.group_id = claim_range.group_id;
            return next taken;
            return;
        end if;
        position := least(settled, part.high - 1);
    end loop;
    if position > start then
        update weir.cursor as c set claimed = position where c.group_id = claim_range.group_id;
    end if;
end
$$;
