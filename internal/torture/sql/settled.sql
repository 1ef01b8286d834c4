-- Settled head and drawn ids of the topics.
select t.topic, t.settled, t.head from weir.topics as t where t.topic = any ($1) order by t.topic
