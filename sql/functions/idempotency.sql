-- weir.reserve_keys(topic, idempotency_keys): takes the keys that the topic does not remember; returns for each message whether
-- it is to be stored. It is not when its key is remembered, or an earlier one of the call has the same.
--
-- A key that another transaction has just taken is waited for. When that commits, the message is a duplicate; when it rolls
-- back, the key is taken after all. Keys that have expired are taken anew.
-- Locks: the rows of the keys, also of those that are remembered, until the transaction ends. In the order of the keys: two
-- calls with the same ones in different orders would wait for each other.
create or replace function weir.reserve_keys(into_topic weir.topic, idempotency_keys text[]) returns boolean[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    taken text[];
begin
    with reserved as (
        insert into weir.idempotency as k (topic_id, key, expires_at)
        select into_topic.id, u.key, clock_timestamp() + into_topic.idempotency_ttl
        from unnest(idempotency_keys) as u (key)
        where u.key is not null
        group by u.key
        order by u.key collate "C"
        on conflict (topic_id, key) do update
        set message_id = null, expires_at = excluded.expires_at
        where k.expires_at <= clock_timestamp()
        returning k.key
    )
    select array_agg(r.key) into taken from reserved as r;
    return (
        select array_agg(u.key is null or u.occurrence = 1 and t.key is not null order by u.position)
        from (
            select v.key, v.position, row_number() over (partition by v.key order by v.position) as occurrence
            from unnest(idempotency_keys) with ordinality as v (key, position)
        ) as u
        left join unnest(taken) as t (key) on t.key = u.key
    );
end
$$;

-- weir.resolve_keys(topic_id, idempotency_keys, store, ids): records which message each key that was taken belongs to; returns an
-- id for each message as weir.store_messages does. ids are those of the messages that were stored, in their order.
create or replace function weir.resolve_keys(topic_id int, idempotency_keys text[], store boolean[], ids bigint[]) returns bigint[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
begin
    update weir.idempotency as k
    set message_id = ids[u.nth]
    from (
        select v.key, row_number() over (order by v.position) as nth
        from unnest(idempotency_keys, store) with ordinality as v (key, store, position)
        where v.store
    ) as u
    where k.topic_id = resolve_keys.topic_id and k.key = u.key;
    return (
        select array_agg(case when u.store then ids[u.nth] else -k.message_id end order by u.position)
        from (
            select v.key, v.store, v.position, count(*) filter (where v.store) over (order by v.position) as nth
            from unnest(idempotency_keys, store) with ordinality as v (key, store, position)
        ) as u
        left join weir.idempotency as k on not u.store and k.topic_id = resolve_keys.topic_id and k.key = u.key
    );
end
$$;
