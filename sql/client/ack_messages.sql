-- Some messages of a lease are handled, in the transaction of their handler.
select weir.ack_messages($1::bigint, $2::text, $3::text::bigint[], $4::bigint)
