-- Gives the next dead messages another life.
select messages, last from weir.redrive_part($1::text, $2::text, null, $3::text::jsonb, $6::text, $4::bigint, $5::int)
