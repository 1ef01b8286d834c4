-- Notes that a consumer has stopped. The commit need not reach the disk.
select weir.consumer_gone($1::text, $2::text, $3::text)
from set_config('synchronous_commit', 'off', true)
