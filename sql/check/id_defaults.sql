-- The log of each topic and every segment take the xid before they draw the id (G1).
select c.oid::regclass as relation, pg_get_expr(d.adbin, d.adrelid) as default_is
from weir.topic as t
join pg_class as p on p.oid = pg_get_serial_sequence(format('weir.log_%s', t.id), 'id')::regclass or p.oid = to_regclass(format('weir.log_%s', t.id))
join pg_class as c on c.oid = p.oid and c.relkind = 'p' or c.oid in (select i.inhrelid from pg_inherits as i where i.inhparent = p.oid)
join pg_attribute as a on a.attrelid = c.oid and a.attname = 'id'
left join pg_attrdef as d on d.adrelid = c.oid and d.adnum = a.attnum
where coalesce(pg_get_expr(d.adbin, d.adrelid), '')
    !~ '^\s*CASE\s+WHEN \(pg_current_xact_id\(\) IS NOT NULL\) THEN nextval\(''.*''::regclass\)\s+ELSE NULL::bigint\s+END$'
