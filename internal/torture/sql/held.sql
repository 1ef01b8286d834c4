-- Under which lease the consumer has each message.
select coalesce(h, '') from weir_torture.held($1, $2, $3, $4) as h
