-- Undoes freeze.sql.
alter system reset synchronous_standby_names
