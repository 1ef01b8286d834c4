-- Drops the ledger.
drop table if exists demo_ledger
