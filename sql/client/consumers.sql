-- Who consumes a group, or any of a topic, or any.
select topic, grp, consumer, started_at, last_seen, leases, messages, oldest, coalesce(about, '{}')::text
from weir.consumers
where (topic = $1::text or $1::text is null) and (grp = $2::text or $2::text is null)
order by topic, grp, started_at nulls last, consumer
