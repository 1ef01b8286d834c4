-- An ordered group has a row for each of its shards, and nothing is pending for, held by or waiting with another one (G3).
select g.name as grp, x.what, x.number
from weir.consumer_group as g
cross join lateral (
    select 'missing' as what, n as number
    from generate_series(0, g.shards - 1) as n
    where not exists (select from weir.shard as s where s.group_id = g.id and s.number = n)
    union all
    select 'too many', s.number from weir.shard as s where s.group_id = g.id and s.number >= coalesce(g.shards, 0)
    union all
    select 'pending', r.shard from weir.shard_range as r where r.group_id = g.id and r.shard >= coalesce(g.shards, 0)
    union all
    select 'held', l.shard from weir.lease as l where l.group_id = g.id and l.shard >= coalesce(g.shards, 0)
    union all
    select 'waiting', d.shard from weir.delivery as d where d.group_id = g.id and d.shard >= coalesce(g.shards, 0)
) as x
