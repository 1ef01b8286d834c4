-- Removes the messages of a key from a segment.
select segment, messages from weir.delete_key($1::text, $2::text, $3::int)
