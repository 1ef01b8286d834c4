-- Raises the default isolation of new sessions.
do $$ begin execute format('alter database %I set default_transaction_isolation to %L', current_database(), 'LEVEL'); end $$
