-- What a reader sends that takes the highest id it has seen for a bound.
select l.id from demo_log as l where l.id > $1 order by l.id limit 1000
