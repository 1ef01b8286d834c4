-- Schema step 5: each log has its own function that inserts (weir.make_insert).

drop function if exists weir.producing_to(text, boolean);
drop function if exists weir.store_messages(
    weir.topic, anyarray, text[], jsonb[], timestamptz[], interval[], int[], interval[], text[], boolean
);
drop function if exists weir.write_batch(uuid, bigint, bigint, boolean, text, bigint[]);
