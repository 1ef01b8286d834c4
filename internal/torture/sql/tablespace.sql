-- Puts new tables of this database on the small file system.
do $$ begin execute format('alter database %I set default_tablespace to torture_small', current_database()); end $$
