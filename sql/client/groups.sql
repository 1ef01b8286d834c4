-- All groups, or those of a topic, or one.
select topic, grp, mode, head, settled, claimed, committed, lag, lag_seconds, leases, retrying, dead, max_attempts, created_at
from weir.groups
where (topic = $1::text or $1::text is null) and (grp = $2::text or $2::text is null)
order by topic, grp
