-- Acknowledges a lease in the caller's transaction.
select weir.ack($1::bigint, $2::text)
