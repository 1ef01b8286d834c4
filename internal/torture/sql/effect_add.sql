-- The effect of a handler.
insert into weir_torture.effect (grp, consumer, ids, vals, leases) values ($1, $2, $3, $4, $5)
