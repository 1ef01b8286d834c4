-- The statements that grant again what migrate_rights found before the steps ($1) and not after them ($2); empty when nothing is lost.
--
-- A right on a function is one on every function of that name, whatever its arguments are now. What is new a role gets only by what
-- it had: the part of the library's calls that a function took over, and the functions that a view which it reads calls now.
with before as (
    select r.kind, r.object, r.column, r.role, r.privilege, r.grantable
    from json_to_recordset($1::json -> 'rights')
        as r (kind text, object text, "column" text, role text, privilege text, grantable boolean)
),
had (function) as (
    select f from json_array_elements_text($1::json -> 'functions') as f
),
successor (function, becomes) as (
    values
        ('produce_many', 'produce_batch'), ('produce_many', 'record_batch'), ('produce_many', 'close_batch'),
        ('produce_many_bytes', 'produce_batch_bytes'), ('produce_many_bytes', 'record_batch'), ('produce_many_bytes', 'close_batch'),
        ('fetch', 'fetch_many'), ('ack', 'ack_messages'), ('fail', 'fail_many'),
        ('poll', 'claimed'), ('poll', 'consumer_here'), ('poll', 'consumer_gone'), ('poll', 'maintain'),
        ('redrive', 'redrive_part'), ('redrive', 'dead_letters_matching'), ('purge', 'purge_part'), ('purge', 'dead_letters_matching')
),
wanted as (
    select * from before
    union
    select b.kind, s.becomes, null, b.role, b.privilege, b.grantable
    from before as b
    join successor as s on s.function = b.object
    where b.kind = 'function' and s.becomes not in (select h.function from had as h)
    union
    select 'function', c.function, null, b.role, 'EXECUTE', false
    from before as b
    join json_to_recordset($2::json -> 'calls') as c (view text, function text) on c.view = b.object
    where b.kind = 'view' and b.privilege = 'SELECT'
      and not exists (
          select from json_to_recordset($1::json -> 'calls') as o (view text, function text)
          where o.view = c.view and o.function = c.function
      )
),
target as (
    select 'function' as kind, f.proname::text as object, null::text as part, 'function ' || f.oid::regprocedure as name, f.proacl as acl
    from pg_proc as f
    where f.pronamespace = (select x.relnamespace from pg_class as x where x.oid = to_regclass('weir.topic'))
    union all
    select 'view', c.relname::text, null, c.oid::regclass::text, c.relacl
    from pg_class as c
    where c.relkind = 'v' and c.relnamespace = (select x.relnamespace from pg_class as x where x.oid = to_regclass('weir.topic'))
    union all
    select 'view', c.relname::text, a.attname::text, c.oid::regclass::text, a.attacl
    from pg_class as c
    join pg_attribute as a on a.attrelid = c.oid and a.attnum > 0
    where c.relkind = 'v' and c.relnamespace = (select x.relnamespace from pg_class as x where x.oid = to_regclass('weir.topic'))
)
select coalesce(string_agg(
    format('grant %s%s on %s to %I%s',
        w.privilege, case when w.column is not null then format(' (%I)', w.column) end, t.name, w.role,
        case when w.grantable then ' with grant option' end),
    '; ' order by t.name, w.role), '')
from wanted as w
join target as t on t.kind = w.kind and t.object = w.object and t.part is not distinct from w.column
where not exists (
    select from aclexplode(t.acl) as a
    join pg_roles as r on r.oid = a.grantee
    where r.rolname = w.role and a.privilege_type = w.privilege and a.is_grantable >= w.grantable
)
