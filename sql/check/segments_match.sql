-- The list of segments is what is attached to each log, without a hole (G1).
select t.name as topic, s.number, s.low, s.high, 'is not attached' as problem
from weir.segment as s
join weir.topic as t on t.id = s.topic_id
where not exists (
    select from pg_inherits as i
    where i.inhparent = to_regclass(format('weir.log_%s', t.id))
      and i.inhrelid = to_regclass(format('weir.log_%s_%s', t.id, s.number))
)
union all
select t.name, s.number, s.low, s.high, 'does not begin where the one before ends'
from (
    select s.topic_id, s.number, s.low, s.high, lag(s.high) over (partition by s.topic_id order by s.low) as before
    from weir.segment as s
) as s
join weir.topic as t on t.id = s.topic_id
where s.before <> s.low
