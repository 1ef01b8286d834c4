-- Removes the next dead messages.
select messages, last from weir.purge_part($1::text, $2::text, null, $3::text::jsonb, $4::bigint, $5::int)
