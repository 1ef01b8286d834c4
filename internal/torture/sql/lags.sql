-- How far the groups of a topic are.
select g.grp, g.lag, g.committed, g.leases + g.waiting + g.retrying from weir.groups as g where g.topic = any ($1)
