-- All groups, or those of a topic, or one.
select topic, grp, mode, head, settled, claimed, committed, lag, lag_seconds, leases, waiting, retrying, dead, max_attempts,
    coalesce(shards, 0), paused_at, coalesce(key_prefix, ''), headers::text, created_at, missed
from weir.groups
where (topic = $1::text or $1::text is null) and (grp = $2::text or $2::text is null)
order by topic, grp
