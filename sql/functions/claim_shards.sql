-- weir.claim_shards(of_group, format, settled, consumer, max_messages, lease, max_bytes): leases free shards of an ordered group that
-- have something to do, until max_messages are taken.
--
-- A shard is free or leased, and one lease at a time is all that keeps its keys in order: whatever is to be done of a shard,
-- new messages and retries alike, is done under it. Nothing is assigned, so nothing is ever rebalanced.
--
-- When the free shards have too little, the next range of the log is shared out among all shards (weir.share_out).
--
-- Locks: rows of weir.shard (skips those that others have), the group's cursor (unless another holds it), until the
-- transaction ends. Indexes: primary keys of shard and shard_range, lease_shard, delivery_shard.
create or replace function weir.claim_shards(
    of_group weir.consumer_group, format text, settled bigint, consumer text, max_messages int, lease interval, max_bytes bigint
)
returns table (lease_id bigint, low bigint, high bigint)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    now_at timestamptz := clock_timestamp();
    claimed bigint;
    candidate int;
    taken record;
begin
    for turn in 1..3 loop
        for candidate in
            select f from weir.free_shards(of_group.id, now_at) as f order by random()
        loop
            perform from weir.shard as s
            where s.group_id = of_group.id and s.number = candidate
            for no key update skip locked;
            continue when not found;
            -- In a statement that is later than the lock: whoever had it before may have leased the shard.
            continue when exists (
                select from weir.lease as l where l.group_id = of_group.id and l.shard = candidate
            );
            select t.* into taken
            from weir.take_shard(of_group, candidate, consumer, max_messages, lease, max_bytes) as t;
            continue when taken.lease_id is null;
            max_messages := max_messages - taken.messages;
            max_bytes := max_bytes - taken.bytes;
            return query select taken.lease_id, taken.low, taken.high;
            if max_messages <= 0 or max_bytes <= 0 then
                return;
            end if;
        end loop;
        select c.claimed into claimed from weir.cursor as c where c.group_id = of_group.id;
        exit when claimed >= settled;
        exit when not weir.share_out(of_group, format, settled, greatest(max_messages, 1000, of_group.shards * 32));
        now_at := clock_timestamp();
    end loop;
end
$$;

-- weir.free_shards(group_id, now_at): the shards of a group that nobody holds and that have something to do.
create or replace function weir.free_shards(group_id int, now_at timestamptz) returns setof int
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set jit = off
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
begin
    -- One probe of each index a shard: joined as sets, the pending ranges of a long backlog would all be read.
    return query
    select s.number
    from weir.shard as s
    where s.group_id = free_shards.group_id
      and (select l.id from weir.lease as l where l.group_id = free_shards.group_id and l.shard = s.number) is null
      and coalesce(
          (select true from weir.shard_range as r where r.group_id = free_shards.group_id and r.shard = s.number limit 1),
          (
              select true from weir.delivery as d
              where d.group_id = free_shards.group_id and d.shard = s.number and d.state = 'ready' and d.suspect
                and d.due_at <= free_shards.now_at
              limit 1
          ),
          (
              select true from weir.delivery as d
              where d.group_id = free_shards.group_id and d.shard = s.number and d.state = 'ready' and not d.suspect
                and d.due_at <= free_shards.now_at
              limit 1
          ),
          false
      );
end
$$;

-- weir.share_out(of_group, format, settled, max_messages): shares the next range of the log out among an ordered group's shards.
-- Returns whether there was any, or may be further on.
--
-- A key's messages all go to the shard of its hash, those without a key to that of their id.
--
-- Locks: the group's cursor, unless another transaction holds it: that one is at it.
create or replace function weir.share_out(of_group weir.consumer_group, format text, settled bigint, max_messages int) returns boolean
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
    select n.* into next from weir.next_range(of_group, format, settled, max_messages, 67108864, false) as n;
    if next.low is null then
        return next.more;
    end if;
    -- As it is under the cursor's lock: weir.alter_group may have changed the shards since the caller read the group.
    select g.* into of_group from weir.consumer_group as g where g.id = of_group.id;
    execute format(
        'insert into weir.shard_range (group_id, shard, low, high, ids, bytes, delayed)
         select $1, %s as shard, $2, $3, array_agg(id order by id), sum(%s), bool_or(deliver_at is not null)
         from weir.log_%s_%s
         where id > $2 and id <= $3%s
         group by shard',
        weir.shard_sql(of_group.shards), weir.size_sql(format), of_group.topic_id, next.segment, weir.filter_sql(of_group))
    using of_group.id, next.low, next.high, 0, of_group.key_prefix, of_group.header_match;
    return true;
end
$$;

-- weir.shard_sql(shards): the expression for the shard, 0 to shards - 1, that a message with the columns key and id belongs to. Its
-- hash is the one that hash partitioning rests on, so it does not change between versions of the server.
create or replace function weir.shard_sql(shards int) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select format('(coalesce(hashtextextended(key collate "C", 0), hashint8extended(id, 0)) & %s)::int', shards - 1)
$$;
