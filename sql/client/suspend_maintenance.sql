-- Suspends maintenance, or lets it go on.
select weir.suspend_maintenance($1::boolean)
