-- Sessions of others in this database. Of other roles' sessions the kind may be hidden; only background processes have no role.
select count(*)
from pg_stat_activity as a
where a.datname = current_database() and a.pid <> pg_backend_pid() and a.application_name <> 'weir torture'
  and a.usesysid is not null and coalesce(a.backend_type, 'client backend') = 'client backend'
