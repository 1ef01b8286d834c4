-- Each topic's sequence gives out ids one by one, in rising order (G1).
select t.name as topic, s.seqcache, s.seqincrement, s.seqcycle
from weir.topic as t
join pg_sequence as s on s.seqrelid = t.sequence
where s.seqcache <> 1 or s.seqincrement <> 1 or s.seqcycle
