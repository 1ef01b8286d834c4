-- A function that is to avoid sequential scans also forbids JIT: an unavoidable one has a cost that sets it off.
select p.oid::regprocedure as function, p.proconfig
from pg_proc as p
where p.pronamespace = (select c.relnamespace from pg_class as c where c.oid = to_regclass('weir.topic'))
  and 'enable_seqscan=off' = any (p.proconfig) and not 'jit=off' = any (p.proconfig)
