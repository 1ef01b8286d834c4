-- How many sessions of that application name the server has.
select count(*) from pg_stat_activity as a where a.application_name = $1
