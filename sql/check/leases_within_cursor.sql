-- No lease reaches past its group's cursor (G1).
select l.id as lease, l.group_id, l.low, l.high, c.claimed
from weir.lease as l
join weir.cursor as c on c.group_id = l.group_id
where l.high > c.claimed
