-- The log of each topic and every segment take the xid before they draw the id (G1).
-- Names are looked up as the snapshot has them. What was dropped since has no text of its default any more.
select c.oid::regclass as relation, pg_get_expr(d.adbin, d.adrelid) as default_is
from weir.topic as t
join pg_class as p
    on p.relname = format('log_%s', t.id)
    and p.relnamespace = (select x.relnamespace from pg_class as x where x.oid = to_regclass('weir.topic'))
join pg_class as c on c.oid = p.oid or c.oid in (select i.inhrelid from pg_inherits as i where i.inhparent = p.oid)
join pg_attribute as a on a.attrelid = c.oid and a.attname = 'id'
left join pg_attrdef as d on d.adrelid = c.oid and d.adnum = a.attnum
where case
    when d.oid is null then true
    else pg_get_expr(d.adbin, d.adrelid)
        !~ '^\s*CASE\s+WHEN \(pg_current_xact_id\(\) IS NOT NULL\) THEN nextval\(''.*''::regclass\)\s+ELSE NULL::bigint\s+END$'
end
