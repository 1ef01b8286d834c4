-- Ids that the ledger has more than once.
select l.topic, i, count(*) from weir_torture.ledger as l cross join lateral unnest(l.ids) as i
group by l.topic, i having count(*) > 1 limit 100
