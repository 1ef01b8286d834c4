-- The list of segments is what is attached to each log, without a hole (G1).
-- Names are looked up as the snapshot has them: to_regclass would know of what came and went since.
with relation as (
    select c.oid, c.relname as name
    from pg_class as c
    where c.relnamespace = (select x.relnamespace from pg_class as x where x.oid = to_regclass('weir.topic'))
)
select t.name as topic, s.number, s.low, s.high, 'is not attached' as problem
from weir.segment as s
join weir.topic as t on t.id = s.topic_id
where not exists (
    select from pg_inherits as i
    join relation as l on l.oid = i.inhparent
    join relation as p on p.oid = i.inhrelid
    where l.name = format('log_%s', t.id) and p.name = format('log_%s_%s', t.id, s.number)
)
union all
select t.name, s.number, s.low, s.high, 'does not begin where the one before ends'
from (
    select s.topic_id, s.number, s.low, s.high, lag(s.high) over (partition by s.topic_id order by s.low) as before
    from weir.segment as s
) as s
join weir.topic as t on t.id = s.topic_id
where s.before <> s.low
