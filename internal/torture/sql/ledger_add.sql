-- Writes down what a transaction has produced.
insert into weir_torture.ledger (topic, first, ids) values ($1, $2, $3)
