-- Wakes the consumers of topics. The commit need not reach the disk.
select set_config('synchronous_commit', 'off', true), pg_notify($1::text, t) from pg_catalog.unnest($2::text[]) as t
