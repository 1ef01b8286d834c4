-- Where every group stands.
select topic, grp, head, settled, claimed, committed, lag, round(lag_seconds::numeric, 1) as lag_seconds, leases, waiting, retrying,
    dead, missed, paused_at
from weir.groups
order by topic, grp
