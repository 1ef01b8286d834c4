-- No group has claimed past the settled head of its topic (G1).
select t.name as topic, g.name as grp, c.claimed, f.settled
from weir.cursor as c
join weir.consumer_group as g on g.id = c.group_id
join weir.topic as t on t.id = g.topic_id
cross join lateral (select max(r.bound) as settled from weir.fence_rows as r where r.topic_id = t.id) as f
where c.claimed > f.settled
