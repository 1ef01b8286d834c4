-- Begins a new segment of the WAL.
select pg_switch_wal() from txid_current()
