-- Messages of leases were not handled; those whose failure is recorded. The commit need not reach the disk: a crash that loses it repeats
-- the messages.
select f.id
from set_config('synchronous_commit', 'off', true)
cross join lateral weir.fail_many(
    $1::bigint[], $2::text, $3::bigint[], $4::text[], $5::text[]::interval[], $6::text[]
) as f (id)
