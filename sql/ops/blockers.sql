-- Which transactions hold up a topic, the oldest first.
select topic, pid, gid, age, state, application, waiting, query
from weir.blockers
order by age desc nulls last
