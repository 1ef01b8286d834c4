-- Stores messages of a json or jsonb topic; their ids, in order.
select id from weir.produce_many($1::text, $2::text[]::json[], $3::text[], $4::text[]::jsonb[]) as p (id)
