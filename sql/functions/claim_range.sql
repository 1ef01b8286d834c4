-- weir.claim_range(of_group, format, settled, consumer, max_messages, lease, max_bytes): the next range of a stream group, leased.
--
-- settled must have been proven in an earlier statement. Messages whose deliver_at has not come become deliveries, which are
-- due then, and are none of the range's. lease_id is null when there was nothing to take; more then tells that there may be
-- something further on.
--
-- Locks: the group's cursor, until the transaction ends.
create or replace function weir.claim_range(
    of_group weir.consumer_group, format text, settled bigint, consumer text, max_messages int, lease interval, max_bytes bigint,
    out lease_id bigint, out low bigint, out high bigint, out more boolean
)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    next record;
    put_off bigint[];
begin
    for turn in 1..20 loop
        select n.* into next from weir.next_range(of_group, format, settled, max_messages, max_bytes, true) as n;
        more := next.more;
        if next.low is null then
            return;
        end if;
        put_off := null;
        if next.delayed then
            execute format('with stored as (%s returning message_id) select array_agg(message_id) from stored',
                weir.delivery_sql(of_group.id, of_group.topic_id, format('log_%s_%s', of_group.topic_id, next.segment),
                    '''ready''', 'deliver_at', '0', 'false', 'null', '''[]''',
                    'id > $1 and id <= $2 and deliver_at > $3' || weir.filter_sql(of_group)))
            into put_off
            using next.low, next.high, clock_timestamp(), null, of_group.key_prefix, of_group.header_match;
        end if;
        if next.messages > coalesce(cardinality(put_off), 0) then
            insert into weir.lease (group_id, low, high, consumer, attempt, expires_at, done)
            values (of_group.id, next.low, next.high, claim_range.consumer, 1, clock_timestamp() + claim_range.lease, put_off)
            returning id, low, high into lease_id, low, high;
            return;
        end if;
        more := true;
    end loop;
end
$$;
