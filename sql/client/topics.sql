-- All topics, or the one of that name.
select topic, format, log, head, settled, segment_size, segments, groups, created_at
from weir.topics
where topic = $1::text or $1::text is null
order by topic
