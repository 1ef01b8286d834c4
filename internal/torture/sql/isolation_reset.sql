-- Undoes isolation_set.sql.
do $$ begin execute format('alter database %I reset default_transaction_isolation', current_database()); end $$
