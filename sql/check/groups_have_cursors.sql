-- Every group has a cursor (G1).
select g.topic_id, g.name
from weir.consumer_group as g
left join weir.cursor as c on c.group_id = g.id
where c.group_id is null
