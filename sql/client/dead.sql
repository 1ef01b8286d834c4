-- Dead letters of a group after an id, or one.
select message_id, attempt, error, died_at, key, headers::text, payload::text, data, produced_at, errors::text
from weir.dead_letters
where topic = $1::text and grp = $2::text and (message_id = $3::bigint or ($3::bigint is null and message_id > $4::bigint))
order by message_id
limit $5::int
