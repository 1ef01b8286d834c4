-- The whole ledger.
select l.topic, l.first, l.ids from weir_torture.ledger as l
