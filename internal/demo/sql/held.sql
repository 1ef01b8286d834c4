-- How many messages each of these consumers holds at this moment.
select h.consumer, count(l.id)
from weir.leases as h
join demo_log as l on l.id > h.low and l.id <= h.high
where h.topic = $1 and h.consumer = any ($2)
group by h.consumer
