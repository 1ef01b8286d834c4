-- Sessions of the torture that have not ended, or do something.
select count(*)
from pg_stat_activity as a
where a.datname = current_database() and a.pid <> pg_backend_pid()
  and (a.application_name like 'torture %' or a.application_name = 'weir torture' and a.state is distinct from 'idle')
