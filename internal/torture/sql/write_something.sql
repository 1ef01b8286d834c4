-- Gives a transaction an xid and something to undo.
create table weir_torture_scratch (n int)
