-- Of each key of an ordered group, the earliest delivery that is not dead is ready, and those after it are parked (G3).
select g.name as grp, d.key, d.message_id, d.state
from (
    select d.group_id, d.key, d.message_id, d.state, min(d.message_id) over (partition by d.group_id, d.key) as earliest
    from weir.delivery as d
    where d.shard is not null and d.key is not null and d.state <> 'dead'
) as d
join weir.consumer_group as g on g.id = d.group_id
where (d.state = 'ready') <> (d.message_id = d.earliest)
