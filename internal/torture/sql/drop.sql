-- Removes what create.sql has made.
drop schema if exists weir_torture cascade;
