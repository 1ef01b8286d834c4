-- weir.alter_group(topic, grp, options): changes options of a group: shards, key_prefix, headers (null for none), max_attempts,
-- retry_delay, retry_max, split_after, as weir.create_group has them. Those that are not given stay.
--
-- shards, key_prefix and headers can be changed while the group is paused and no consumer holds a lease: what is held was chosen by
-- the filter as it was, and what waits in the shards is shared out anew, so that a key never belongs to two shards. A filter counts
-- for what is claimed from then on.
--
-- Errors: WE001, WE002, WE003, WE006, WE012 (shards, key_prefix, headers: the group is not paused, or a consumer holds a lease).
-- Locks: the group's row; for those three also its shards and cursor, until the transaction ends.
create or replace function weir.alter_group(topic text, grp text, options jsonb) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    was weir.consumer_group := weir.group_named(topic, grp);
    wanted weir.consumer_group;
    on_topic weir.topic := weir.topic_named(topic);
    part record;
begin
    perform weir.check_primary();
    perform weir.check_options(options, array['shards', 'key_prefix', 'headers', 'max_attempts', 'retry_delay', 'retry_max', 'split_after']);
    select g.* into was from weir.consumer_group as g where g.id = was.id for no key update;
    wanted := weir.group_options(was, options);
    if wanted.shards <> was.shards or wanted.key_prefix is distinct from was.key_prefix
        or wanted.header_match is distinct from was.header_match
    then
        -- Whoever claims has a shard's row, or the cursor; once both are had nobody is in the midst of it.
        perform from weir.shard as s where s.group_id = was.id order by s.number for update;
        perform from weir.cursor as c where c.group_id = was.id for no key update;
        -- A paused group takes nothing over: what a dead consumer held of its shards is pending again.
        with ended as (
            delete from weir.lease as l
            where l.group_id = was.id and l.shard is not null and l.expires_at <= clock_timestamp()
            returning l.*
        )
        insert into weir.shard_range (group_id, shard, low, high, ids, bytes, delayed)
        select e.group_id, e.shard, e.low, e.high, i.ids, cardinality(i.ids) * 1000, true
        from ended as e
        cross join lateral (
            select array_agg(u.id order by u.id) as ids from unnest(e.ids) as u (id) where u.id <> all (coalesce(e.done, '{}'))
        ) as i
        where i.ids is not null;
        if was.paused_at is null or exists (select from weir.lease as l where l.group_id = was.id) then
            raise exception 'the shards and the filter of group % cannot be changed now', quote_literal(grp)
                using errcode = 'WE012',
                      detail = case when was.paused_at is null then 'It is not paused.' else 'A consumer still holds a lease.' end,
                      hint = 'Pause the group with weir.pause_group(), wait until weir.leases has none of it (a range whose consumer died is taken over after a resume), then try again.';
        end if;
    end if;
    update weir.consumer_group as g
    set shards = wanted.shards, key_prefix = wanted.key_prefix, header_match = wanted.header_match, max_attempts = wanted.max_attempts,
        retry_delay = wanted.retry_delay, retry_max = wanted.retry_max, split_after = wanted.split_after
    where g.id = was.id;
    if wanted.shards <> was.shards then
        delete from weir.shard as s where s.group_id = was.id and s.number >= wanted.shards;
        insert into weir.shard (group_id, number)
        select was.id, n from generate_series(was.shards, wanted.shards - 1) as n;
        execute format(
            'update weir.delivery set shard = %s
             from (select message_id as id from weir.delivery where group_id = $1 and shard is not null) as m
             where group_id = $1 and message_id = m.id',
            weir.shard_sql(wanted.shards))
        using was.id;
        -- The parts of a range that were taken have raised its low: shared out anew is what is left, by the whole range.
        for part in
            with gone as (
                delete from weir.shard_range as r where r.group_id = was.id returning r.low, r.high, r.ids
            )
            select min(g.low) as low, g.high, array_agg(i.id) as ids
            from gone as g
            cross join lateral unnest(g.ids) as i (id)
            group by g.high
            order by g.high
        loop
            execute format(
                'insert into weir.shard_range (group_id, shard, low, high, ids, bytes, delayed)
                 select $1, %s as shard, $2, $3, array_agg(id order by id), sum(%s), bool_or(deliver_at is not null)
                 from weir.%I
                 where id = any ($4)
                 group by shard',
                weir.shard_sql(wanted.shards), weir.size_sql(on_topic.format), weir.segment_name(on_topic.id, part.high))
            using was.id, part.low, part.high, part.ids;
        end loop;
    end if;
end
$$;
