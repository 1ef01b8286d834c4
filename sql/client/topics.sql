-- All topics, or the one of that name.
select topic, format, log, head, settled, segment_size, segments, groups, created_at, messages, bytes, oldest_at,
    coalesce(extract(epoch from retention_age), 0)::float8, coalesce(retention_bytes, 0), drop_unread, compact, restricted
from weir.topics
where topic = $1::text or $1::text is null
order by topic
