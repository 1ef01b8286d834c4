-- Since when maintenance is suspended.
select weir.maintenance_suspended()
