-- What holds up the topics, or one of them, the oldest first.
select topic, coalesce(pid, 0), coalesce(gid, ''), coalesce(extract(epoch from age), 0)::float8, coalesce(state, ''),
    coalesce(application, ''), coalesce(query, ''), waiting
from weir.blockers
where topic = $1::text or $1::text is null
order by age desc nulls last
