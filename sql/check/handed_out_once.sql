-- A message of an ordered group is pending in one shard, or in one lease, or is a delivery that is not dead: never two of
-- them (G3).
with places as (
    select r.group_id, i.id from weir.shard_range as r cross join lateral unnest(r.ids) as i (id)
    union all
    select l.group_id, i.id
    from weir.lease as l
    cross join lateral unnest(l.ids) as i (id)
    where i.id <> all (coalesce(l.done, '{}'))
    union all
    select d.group_id, d.message_id from weir.delivery as d where d.shard is not null and d.state <> 'dead'
)
select t.name as topic, g.name as grp, p.id as message_id, count(*) as times
from places as p
join weir.consumer_group as g on g.id = p.group_id
join weir.topic as t on t.id = g.topic_id
group by t.name, g.name, p.id
having count(*) > 1
