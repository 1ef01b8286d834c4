-- The messages of the range that the statement before this one has claimed.
select f.id, f.key, f.headers::text, f.payload::text, f.data, f.produced_at, f.attempt, c.id,
    coalesce(extract(epoch from f.timeout), 0)::float8
from weir.claimed() as c (id)
cross join lateral weir.fetch(c.id) as f
