-- The views: what operators and programs read. Numbers are taken at the moment of the query; none of them scans a log.

-- weir.topics: one row a topic.
--   log       the partitioned table that holds the messages, sequence the one that numbers them
--   head      highest visible id, 0 while the log is empty
--   settled   the settled head: nothing at or below it can still appear
--   segments  how many there are
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
    (select count(*) from weir.segment as s where s.topic_id = t.id) as segments,
    (select count(*) from weir.consumer_group as g where g.topic_id = t.id) as groups,
    t.created_at
from weir.topic as t
cross join lateral (select max(r.bound) as settled from weir.fence_rows as r where r.topic_id = t.id) as f;

-- weir.groups: one row a group.
--   claimed      the cursor: highest id that was given out
--   committed    everything at or below it is handled, or has a delivery of its own
--   lag          ids from committed to head: an upper bound of the messages that are still to be handled, since ids can
--                be gaps
--   lag_seconds  age of the oldest of them; 0 when there is none
--   leases       ranges held at this moment
--   retrying     deliveries that wait for another attempt, or are at it
--   dead         dead letters
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
    p.leases,
    d.retrying,
    d.dead,
    g.max_attempts,
    g.retry_delay,
    g.retry_max,
    g.split_after,
    g.created_at,
    g.id
from weir.consumer_group as g
join weir.topics as t on t.id = g.topic_id
join weir.cursor as c on c.group_id = g.id
cross join lateral (
    select count(*) as leases, least(min(l.low), c.claimed) as committed from weir.lease as l where l.group_id = g.id
) as p
cross join lateral (
    select
        count(*) filter (where d.state <> 'dead') as retrying,
        count(*) filter (where d.state = 'dead') as dead
    from weir.delivery as d
    where d.group_id = g.id
) as d;

-- weir.leases: one row a range that is claimed and not yet acknowledged.
create or replace view weir.leases as
select l.id as lease_id, t.name as topic, g.name as grp, l.low, l.high, l.consumer, l.attempt, l.claimed_at, l.expires_at
from weir.lease as l
join weir.consumer_group as g on g.id = l.group_id
join weir.topic as t on t.id = g.topic_id;

-- weir.deliveries: one row a message that has a delivery of its own.
--   due_at  when it can be claimed next; while it is leased, when the lease ends
create or replace view weir.deliveries as
select
    t.name as topic, g.name as grp, d.message_id, d.state, d.due_at, d.attempt, d.lease_id, d.consumer, d.key, d.headers,
    d.payload, d.data, d.produced_at, d.errors, d.created_at
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

-- weir.blockers: the transactions that keep a topic's settled head below its head: producers of that topic that have not
-- finished while later messages wait behind them. pid is null and gid is set for a prepared transaction. waiting is the number
-- of ids behind it, at most. Another role's query is shown to members of pg_read_all_stats only.
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
left join pg_stat_activity as a on a.pid = h.pid
left join pg_prepared_xacts as x
    on h.pid is null and exists (
        select from locks as o
        where o.virtualtransaction = h.virtualtransaction and o.locktype = 'transactionid' and o.transactionid = x.transaction
    )
where h.locktype = 'relation' and h.mode = 'RowExclusiveLock'
  and h.database = (select d.oid from pg_database as d where d.datname = current_database())
  and h.pid is distinct from pg_backend_pid() and v.head > v.settled;
