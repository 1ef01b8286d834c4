-- weir.feed_queue(of_group, format, settled): makes deliveries of the next messages of a queue group. Returns whether there were
-- any, or may be further on.
--
-- It moves the cursor in the same transaction, so that a message is either above the cursor or has had its delivery: whatever
-- is lost with a crash is lost together, and made again. It feeds ahead of what is asked for, or a message of high priority
-- would wait behind all that were produced before it.
--
-- Locks: the group's cursor, unless another transaction holds it: that one is feeding.
create or replace function weir.feed_queue(of_group weir.consumer_group, format text, settled bigint) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    next record;
begin
    select n.* into next from weir.next_range(of_group, format, settled, 1000, 4194304, false) as n;
    if next.low is null then
        return next.more;
    end if;
    execute weir.delivery_sql(of_group.id, of_group.topic_id, format('log_%s_%s', of_group.topic_id, next.segment),
        '''ready''', 'greatest(deliver_at, produced_at)', '0', 'false', 'null', '''[]''',
        'id > $1 and id <= $2' || weir.filter_sql(of_group))
    using next.low, next.high, null, null, of_group.key_prefix, of_group.header_match;
    return true;
end
$$;
