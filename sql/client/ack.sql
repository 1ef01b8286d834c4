-- Ends a lease, in the transaction of its handler.
select weir.ack($1::bigint, $2::text)
