-- Stores messages of a bytes topic; their ids, in order.
select id from weir.produce_many_bytes($1::text, $2::bytea[], $3::text[], $4::text[]::jsonb[]) as p (id)
