-- What is granted on functions and views, as JSON for weir.migrate_grants: a step that makes them anew loses it.
--
-- functions  the names there are
-- calls      which functions a view calls, itself or by a view that it reads: whoever reads it needs EXECUTE on them
-- rights     who has which right on what, by name. column is null for the whole; the owner's own are left out, and PUBLIC's, which
--            has none
with recursive part (view, object) as (
    select c.oid, c.oid
    from pg_class as c
    where c.relkind = 'v' and c.relnamespace = (select x.relnamespace from pg_class as x where x.oid = to_regclass('weir.topic'))
    union
    select p.view, c.oid
    from part as p
    join pg_rewrite as r on r.ev_class = p.object
    join pg_depend as d on d.classid = 'pg_rewrite'::regclass and d.objid = r.oid and d.refclassid = 'pg_class'::regclass
    join pg_class as c on c.oid = d.refobjid and c.relkind = 'v'
),
function as (
    select f.oid, f.proname as name, f.proowner, f.proacl
    from pg_proc as f
    where f.pronamespace = (select x.relnamespace from pg_class as x where x.oid = to_regclass('weir.topic'))
),
calls as (
    select distinct v.relname as view, f.name as function
    from part as p
    join pg_class as v on v.oid = p.view
    join pg_rewrite as r on r.ev_class = p.object
    join pg_depend as d on d.classid = 'pg_rewrite'::regclass and d.objid = r.oid and d.refclassid = 'pg_proc'::regclass
    join function as f on f.oid = d.refobjid
),
granted as (
    select 'function' as kind, f.name as object, null::name as part, f.proowner as owner, a.grantee, a.privilege_type, a.is_grantable
    from function as f
    cross join lateral aclexplode(f.proacl) as a
    union all
    select 'view', v.relname, null, v.relowner, a.grantee, a.privilege_type, a.is_grantable
    from part as p
    join pg_class as v on v.oid = p.view and p.object = p.view
    cross join lateral aclexplode(v.relacl) as a
    union all
    select 'view', v.relname, c.attname, v.relowner, a.grantee, a.privilege_type, a.is_grantable
    from part as p
    join pg_class as v on v.oid = p.view and p.object = p.view
    join pg_attribute as c on c.attrelid = v.oid and c.attnum > 0
    cross join lateral aclexplode(c.attacl) as a
)
select json_build_object(
    'functions', (select coalesce(json_agg(distinct f.name), '[]') from function as f),
    'calls', (select coalesce(json_agg(c), '[]') from calls as c),
    'rights', (
        select coalesce(json_agg(json_build_object(
            'kind', g.kind, 'object', g.object, 'column', g.part, 'role', r.rolname, 'privilege', g.privilege_type, 'grantable', g.is_grantable
        )), '[]')
        from granted as g
        join pg_roles as r on r.oid = g.grantee
        where g.grantee <> g.owner
    )
)::text
