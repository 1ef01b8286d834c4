-- Server processes of the processes of a torture, in an order that is no one's.
select a.pid from pg_stat_activity as a
where a.datname = current_database() and a.application_name like 'torture %' and a.pid <> pg_backend_pid()
order by md5(a.pid::text || $1)
