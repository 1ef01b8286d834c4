-- Stores messages of a json or jsonb topic; a row for each, in order.
select id, duplicate
from weir.produce_batch(
    $1::text, $2::json[], $3::text[], $4::jsonb[], $5::text[]::timestamptz[], $6::text[]::interval[],
    $7::text[]::int[], $8::text[]::interval[], $9::text[], $10::uuid, $11::bigint
)
