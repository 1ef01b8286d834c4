-- How these leases ended.
select
    e.lease,
    e.how,
    (extract(epoch from e.at) * 1000000)::bigint,
    (extract(epoch from e.asked_at) * 1000000)::bigint,
    (extract(epoch from e.expires_at) * 1000000)::bigint
from weir_torture.lease_end as e
where e.lease = any ($1)
