-- The highest id that is visible.
select coalesce(max(l.id), 0) from demo_log as l
