-- No message is retried or dead that its group has not claimed, unless the group was moved back (G2).
select d.group_id, d.message_id, g.head
from weir.delivery as d
join weir.groups as g on g.id = d.group_id
where d.message_id > g.settled
