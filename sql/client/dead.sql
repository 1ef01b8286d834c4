-- The next dead letters of a group that match a filter.
select message_id, attempt, error, died_at, key, headers::text, payload::text, data, produced_at, errors::text
from weir.dead_letters_matching($1::text, $2::text, $3::text::jsonb, $4::bigint, $5::int)
