-- For lease_ends.sql, once nothing is written any more.
create index if not exists lease_end_lease on weir_torture.lease_end (lease)
