-- Nothing is granted to PUBLIC.
select p.oid::regprocedure::text as object, a.privilege_type
from pg_proc as p
cross join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) as a
where p.pronamespace = (select c.relnamespace from pg_class as c where c.oid = to_regclass('weir.topic')) and a.grantee = 0
union all
select c.oid::regclass::text, a.privilege_type
from pg_class as c
cross join lateral aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) as a
where c.relnamespace = (select c.relnamespace from pg_class as c where c.oid = to_regclass('weir.topic'))
  and c.relkind in ('r', 'p', 'v') and a.grantee = 0
