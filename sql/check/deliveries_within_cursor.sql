-- No message is retried or dead that its group has not claimed, unless the group was moved back (G2).
select d.group_id, d.message_id, f.settled
from weir.delivery as d
join weir.consumer_group as g on g.id = d.group_id
cross join lateral (select max(r.bound) as settled from weir.fence_rows as r where r.topic_id = g.topic_id) as f
where d.message_id > f.settled
