-- The ranges that a group's consumers hold do not overlap (G1).
select a.group_id, a.id as lease, b.id as other, a.low, a.high, b.low as other_low, b.high as other_high
from weir.lease as a
join weir.lease as b on b.group_id = a.group_id and b.id > a.id and b.low < a.high and a.low < b.high
where a.shard is null and b.shard is null
