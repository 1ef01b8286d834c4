-- One piece of upkeep.
select coalesce(topic, ''), action, detail from weir.maintain()
