-- Gives a lease back. The commit need not reach the disk: a crash that loses it leaves the lease to expire.
select weir.release($1::bigint, $2::text, $3::bigint[])
from set_config('synchronous_commit', 'off', true)
