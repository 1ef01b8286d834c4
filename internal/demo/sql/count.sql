-- How many messages there are with low < id <= high.
select count(*) from demo_log as l where l.id > $1 and l.id <= $2
