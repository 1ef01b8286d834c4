-- weir.consumer_here(topic, grp, consumer, backend, about): notes that a consumer runs, for weir.consumers.
--
-- backend  pg_backend_pid() of a connection that stays open as long as the consumer's process lives, null for none
-- about    what people may want to know: host, process
--
-- Nothing depends on it: who is not noted consumes all the same. It is called at the start and when backend changes, not while
-- the consumer is idle. Rows of processes of the group that are gone for an hour are removed. Errors: WE001, WE002.
create or replace function weir.consumer_here(topic text, grp text, consumer text, backend int, about jsonb) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    of_group weir.consumer_group := weir.group_named(topic, grp);
begin
    perform weir.check_name('consumer', consumer);
    delete from weir.consumer as c
    where c.group_id = of_group.id and c.seen_at < clock_timestamp() - interval '1 hour'
      and not exists (
          select from pg_stat_activity as a where a.pid = c.backend and a.backend_start is not distinct from c.backend_start
      );
    insert into weir.consumer as c (group_id, name, backend, backend_start, about)
    values (
        of_group.id, consumer_here.consumer, consumer_here.backend,
        (select a.backend_start from pg_stat_activity as a where a.pid = consumer_here.backend),
        coalesce(consumer_here.about, '{}')
    )
    on conflict (group_id, name) do update
    set backend = excluded.backend, backend_start = excluded.backend_start, about = excluded.about, seen_at = clock_timestamp();
end
$$;

-- weir.consumer_gone(topic, grp, consumer): notes that it has stopped.
create or replace function weir.consumer_gone(topic text, grp text, consumer text) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    of_group weir.consumer_group := weir.group_named(topic, grp);
begin
    delete from weir.consumer as c where c.group_id = of_group.id and c.name = consumer_gone.consumer;
end
$$;
