-- Records what is installed now.
insert into weir.meta (version, compatible, functions) values ($1::int, $2::int, $3::text)
on conflict (only_row) do update
set version = excluded.version, compatible = excluded.compatible, functions = excluded.functions, changed_at = clock_timestamp()
