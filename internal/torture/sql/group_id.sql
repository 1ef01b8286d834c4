-- The number of a group.
select g.id from weir.groups as g where g.topic = $1 and g.grp = $2
