-- One migration of this install at a time. The lock ends with the transaction; lock_timeout applies.
select pg_advisory_xact_lock(hashtextextended('weir.migrate', 0))
