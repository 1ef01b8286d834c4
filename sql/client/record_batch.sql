-- Records a batch as stored by the transaction that this commit ends.
select weir.record_batch($1::uuid, $2::bigint)
