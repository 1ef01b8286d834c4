-- Was the batch stored? If not it never will be.
select weir.close_batch($1::uuid, $2::bigint)
