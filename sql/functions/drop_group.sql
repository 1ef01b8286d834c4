-- weir.drop_group(topic, grp, force): removes a group with its cursor, leases, retries and dead letters. Returns whether there was
-- one.
--
-- force  also when it is live: a consumer of it runs, or holds something. It gets WE002 at its next call
--
-- Errors: WE001, WE012 (it is live). Locks: the group's rows.
create or replace function weir.drop_group(topic text, grp text, force boolean default false) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    on_topic weir.topic := weir.topic_named(topic);
    of_group weir.consumer_group;
    dropped int;
begin
    perform weir.check_primary();
    select g.* into of_group
    from weir.consumer_group as g
    where g.topic_id = on_topic.id and g.name = grp
    -- Not for update, which a claim would wait for that writes a lease, and holds what this one waits for.
    for no key update;
    dropped := of_group.id;
    if dropped is null then
        return false;
    end if;
    if not force then
        perform weir.refuse_live(of_group);
    end if;
    -- Leases before the cursor, as in weir.poll; again after it, for what was claimed meanwhile. Later claims wait for the
    -- cursor and then find it gone.
    for turn in 1..2 loop
        perform weir.end_leases(dropped);
        delete from weir.delivery as d where d.group_id = dropped;
        delete from weir.cursor as c where c.group_id = dropped;
    end loop;
    delete from weir.shard as s where s.group_id = dropped;
    delete from weir.consumer as c where c.group_id = dropped;
    delete from weir.consumer_group as g where g.id = dropped;
    return true;
end
$$;

-- weir.refuse_live(of_group): error WE012 when a consumer of the group runs, or holds something.
create or replace function weir.refuse_live(of_group weir.consumer_group) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    who text;
begin
    select x.name into who
    from (
        select l.consumer as name from weir.lease as l where l.group_id = of_group.id and l.expires_at > clock_timestamp()
        union all
        select d.consumer from weir.delivery as d
        where d.group_id = of_group.id and (d.state = 'leased' or d.state = 'ready' and not d.suspect)
          and d.state = 'leased' and d.due_at > clock_timestamp()
        union all
        select c.name
        from weir.consumer as c
        join pg_stat_activity as a on a.pid = c.backend and a.backend_start is not distinct from c.backend_start
        where c.group_id = of_group.id
    ) as x
    limit 1;
    if who is not null then
        raise exception 'group % is live', quote_literal(of_group.name)
            using errcode = 'WE012', detail = format('Its consumer %s runs or holds messages.', who),
                  hint = 'Stop its consumers first, or call with force => true.';
    end if;
end
$$;
