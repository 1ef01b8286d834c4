-- The views: what operators and programs read. Numbers are taken at the moment of the query; none of them scans a log.

-- weir.topics: one row a topic.
--   log       the partitioned table that holds the messages, sequence the one that numbers them
--   head      highest visible id, 0 while the log is empty
--   settled   the settled head: nothing at or below it can still appear
--   segments  how many there are
--   messages  about how many it has: of segments that are full as they were counted then, of others by their ids
--   bytes     what they take on disk, indexes included
--   oldest_at when the oldest was produced, of those that are counted
create or replace view weir.topics as
select
    t.id,
    t.name as topic,
    t.format,
    format('weir.log_%s', t.id) as log,
    format('weir.log_%s_id', t.id) as sequence,
    coalesce(weir.head(t.id, f.settled), f.settled) as head,
    f.settled,
    t.segment_size,
    (select count(*) from weir.segment as s where s.topic_id = t.id and s.emptied_at is null) as segments,
    (select count(*) from weir.consumer_group as g where g.topic_id = t.id) as groups,
    t.created_at,
    coalesce((
        select sum(case when s.sealed_at is not null then s.messages else greatest(least(s.high - 1, weir.drawn(t.id)) - s.low + 1, 0) end)
        from weir.segment as s
        where s.topic_id = t.id and s.emptied_at is null
    ), 0)::bigint as messages,
    coalesce((
        select sum(coalesce(s.bytes, pg_total_relation_size(to_regclass(format('weir.log_%s_%s', s.topic_id, s.number)))))
        from weir.segment as s
        where s.topic_id = t.id and s.emptied_at is null
    ), 0)::bigint as bytes,
    weir.produced_after(t.id, 0) as oldest_at,
    t.retention_age,
    t.retention_bytes,
    t.drop_unread,
    t.compact,
    t.tombstone_ttl,
    t.idempotency_ttl,
    t.restricted
from weir.topic as t
cross join lateral (select max(r.bound) as settled from weir.fence_rows as r where r.topic_id = t.id) as f
where t.dropped_at is null;

-- weir.groups: one row a group.
--   claimed      the cursor: highest id that was given out
--   committed    everything at or below it is handled, or has a delivery of its own
--   lag          ids from committed to head: an upper bound of the messages that are still to be handled, since ids can
--                be gaps
--   lag_seconds  age of the oldest of them; 0 when there is none
--   leases       ranges, shards and single messages held at this moment
--   waiting      deliveries that have not failed yet: of a queue group those not yet handled, else those put off or
--                parked behind an earlier one of their key
--   retrying     deliveries that wait for another attempt, or are at it
--   dead         dead letters
--   paused_at    since when nothing is handed out, null while it is not paused
--   shards       of an ordered group
--   missed       messages that retention removed before the group had finished them, where the topic allows that; missed_at when it
--                last did
create or replace view weir.groups as
select
    t.topic,
    g.name as grp,
    g.mode,
    t.head,
    t.settled,
    c.claimed,
    p.committed,
    greatest(t.head - p.committed, 0) as lag,
    case
        when t.head > p.committed
        then coalesce(extract(epoch from clock_timestamp() - weir.produced_after(t.id, p.committed)), 0)::double precision
        else 0
    end as lag_seconds,
    p.leases + d.leased as leases,
    d.waiting,
    d.retrying,
    d.dead,
    g.paused_at,
    g.shards,
    g.key_prefix,
    g.header_match as headers,
    g.max_attempts,
    g.retry_delay,
    g.retry_max,
    g.split_after,
    g.created_at,
    g.id,
    g.missed,
    g.missed_at
from weir.consumer_group as g
join weir.topics as t on t.id = g.topic_id
join weir.cursor as c on c.group_id = g.id
cross join lateral (
    select
        count(*) as leases,
        least(
            min(l.low),
            c.claimed,
            (
                select min(x.low)
                from weir.shard as s
                cross join lateral (
                    select r.low from weir.shard_range as r where r.group_id = g.id and r.shard = s.number order by r.low limit 1
                ) as x
                where s.group_id = g.id
            )
        ) as committed
    from weir.lease as l
    where l.group_id = g.id
) as p
cross join lateral weir.count_deliveries(g.id) as d;

-- weir.leases: one row a range or shard that is claimed and not yet acknowledged. low and high are null where a shard is held for
-- retries alone, how many of which it has stands in retries.
create or replace view weir.leases as
select
    l.id as lease_id, t.name as topic, g.name as grp, l.low, l.high, l.consumer, l.attempt, l.claimed_at, l.expires_at, l.shard,
    coalesce(cardinality(l.retries), 0) as retries
from weir.lease as l
join weir.consumer_group as g on g.id = l.group_id
join weir.topic as t on t.id = g.topic_id;

-- weir.deliveries: one row a message that has a delivery of its own.
--   state   ready: waits for due_at; leased; parked: waits for an earlier message of its key; dead
--   due_at  when it can be claimed next; while it is leased, when the lease ends
create or replace view weir.deliveries as
select
    t.name as topic, g.name as grp, d.message_id, d.state, d.due_at, d.attempt, d.lease_id, d.consumer, d.key, d.headers,
    d.payload, d.data, d.produced_at, d.errors, d.created_at, d.priority, d.timeout, d.shard
from weir.delivery as d
join weir.consumer_group as g on g.id = d.group_id
join weir.topic as t on t.id = g.topic_id;

-- weir.dead_letters: those of them that are dead, with their last error.
create or replace view weir.dead_letters as
select
    d.topic, d.grp, d.message_id, d.attempt, d.errors -> -1 ->> 'error' as error, (d.errors -> -1 ->> 'at')::timestamptz as died_at,
    d.key, d.headers, d.payload, d.data, d.produced_at, d.errors
from weir.deliveries as d
where d.state = 'dead';

-- weir.consumers: one row a consumer that runs, or that holds something.
--   started_at   null for one that has not said it is there (a program that calls the SQL functions)
--   last_seen    now, while the connection that its process listens on is open; else when it last renewed a lease
--   leases       ranges, shards and single messages that it holds, messages at most as many as that
--   oldest       when the oldest of them was claimed
create or replace view weir.consumers as
select
    t.name as topic,
    g.name as grp,
    h.consumer,
    c.started_at,
    case when a.pid is not null then clock_timestamp() else c.seen_at end as last_seen,
    h.leases,
    h.messages,
    h.oldest,
    c.about
from (
    select x.group_id, x.consumer, sum(x.leases)::bigint as leases, sum(x.messages)::bigint as messages, min(x.oldest) as oldest
    from (
        select c.group_id, c.name as consumer, 0 as leases, 0::bigint as messages, null::timestamptz as oldest from weir.consumer as c
        union all
        select
            l.group_id, l.consumer, 1,
            case when l.shard is null then l.high - l.low else coalesce(cardinality(l.ids), 0) + coalesce(cardinality(l.retries), 0) end
                - coalesce(cardinality(l.done), 0),
            l.claimed_at
        from weir.lease as l
        union all
        select d.group_id, d.consumer, 1, 1, null from weir.delivery as d where d.lease_id is not null
    ) as x
    group by x.group_id, x.consumer
) as h
join weir.consumer_group as g on g.id = h.group_id
join weir.topic as t on t.id = g.topic_id
left join weir.consumer as c on c.group_id = h.group_id and c.name = h.consumer
left join pg_stat_activity as a on a.pid = c.backend and a.backend_start is not distinct from c.backend_start;

-- weir.blockers: the transactions that keep a topic's settled head below its head: producers of that topic that have not
-- finished while later messages wait behind them; as in weir.settle, a holder of the sequence's lock without an xid has only
-- read it. A poll, and whoever runs maintenance, reads it and then writes to Weir's tables, but not to the log: it is over at
-- once, and left out. pid is null and gid is set for a prepared transaction. waiting is the number of ids behind it, at most.
-- Another role's query is shown to members of pg_read_all_stats only.
create or replace view weir.blockers as
with locks as materialized (
    select l.locktype, l.database, l.relation, l.transactionid, l.pid, l.virtualtransaction, l.mode
    from pg_locks as l
    where l.granted
)
select
    v.topic,
    h.pid,
    x.gid,
    clock_timestamp() - coalesce(a.xact_start, x.prepared) as age,
    case when h.pid is null then 'prepared' else a.state end as state,
    a.application_name as application,
    a.query,
    v.head - v.settled as waiting
from locks as h
join weir.topic as t on t.sequence = h.relation
join weir.topics as v on v.id = t.id
cross join lateral (select to_regclass(format('weir.log_%s', t.id)) as log) as n
left join pg_stat_activity as a on a.pid = h.pid
left join pg_prepared_xacts as x
    on h.pid is null and exists (
        select from locks as o
        where o.virtualtransaction = h.virtualtransaction and o.locktype = 'transactionid' and o.transactionid = x.transaction
    )
where h.locktype = 'relation' and h.mode = 'RowExclusiveLock'
  and h.database = (select d.oid from pg_database as d where d.datname = current_database())
  and exists (
      select from locks as o
      where o.virtualtransaction = h.virtualtransaction and o.locktype = 'transactionid' and o.mode = 'ExclusiveLock'
  )
  and (
      select coalesce(bool_or(o.relation = n.log), true)
      from locks as o
      where o.virtualtransaction = h.virtualtransaction and o.locktype = 'relation' and o.mode = 'RowExclusiveLock' and o.database = h.database
        and o.relation in (n.log, 'weir.cursor'::regclass, 'weir.fence'::regclass, 'weir.lease'::regclass, 'weir.segment'::regclass)
  )
  and h.pid is distinct from pg_backend_pid() and v.head > v.settled;
