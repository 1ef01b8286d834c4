-- Prepared transactions that a torture has left.
select p.gid from pg_prepared_xacts as p where p.database = current_database() and p.gid like 'weir_torture%'
