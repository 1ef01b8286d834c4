-- No topic's sequence stands below its settled head (G1): it would issue ids again. Of a topic that was dropped since there is none.
select t.name as topic, weir.drawn(t.id) as drawn, f.settled
from weir.topic as t
cross join lateral (select max(r.bound) as settled from weir.fence_rows as r where r.topic_id = t.id) as f
where case when to_regclass(format('weir.log_%s_id', t.id)) is not null then weir.drawn(t.id) < f.settled end
