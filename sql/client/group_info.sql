-- Fails with WE001 or WE002 unless the group exists.
select (weir.group_named($1::text, $2::text)).mode
