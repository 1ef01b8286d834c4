-- All effects.
select e.grp, e.consumer, e.ids, e.vals, e.leases, (extract(epoch from e.at) * 1000000)::bigint from weir_torture.effect as e
