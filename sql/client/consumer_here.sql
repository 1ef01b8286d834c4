-- Notes that a consumer runs. The commit need not reach the disk.
select weir.consumer_here($1::text, $2::text, $3::text, $4::int, $5::text::jsonb)
from set_config('synchronous_commit', 'off', true)
