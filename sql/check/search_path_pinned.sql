-- Every function pins its search_path, pg_temp last.
select p.oid::regprocedure as function, p.proconfig
from pg_proc as p
where p.pronamespace = (select c.relnamespace from pg_class as c where c.oid = to_regclass('weir.topic'))
  and not coalesce('search_path=pg_catalog, pg_temp' = any (p.proconfig), false)
