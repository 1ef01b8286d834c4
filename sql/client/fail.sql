-- One message of a lease was not handled. The commit need not reach the disk: a crash that loses it repeats the message.
select weir.fail($1::bigint, $2::text, $3::bigint, $4::text, make_interval(secs => $5::float8), $6::text)
from set_config('synchronous_commit', 'off', true)
