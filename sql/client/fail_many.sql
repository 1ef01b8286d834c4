-- Messages of leases were not handled; those whose failure is recorded. The commit reaches the disk, whatever the session has it set to: the
-- client acknowledges the rest of a lease in the belief that these are kept, and the lease may outlive a crash that this does not.
select f.id
from set_config(
    'synchronous_commit', coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'local'), true
)
cross join lateral weir.fail_many(
    $1::bigint[], $2::text, $3::bigint[], $4::text[], $5::text[]::interval[], $6::text[]
) as f (id)
