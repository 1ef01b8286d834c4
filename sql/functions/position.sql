-- weir.position(topic_id, target, field): the cursor from which target is read on.
--
-- target  "beginning", "head", {"id": n} or {"time": "..."}; field names it in errors (WE003)
--
-- "head" is the settled head, not the highest visible id: a message below that which commits later belongs to a group that
-- was there before it committed. "time" is found by halving each segment: ids and times of production rise together, but
-- for the order of commits.
create or replace function weir.position(topic_id int, target jsonb, field text) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    settled bigint := weir.settled_head(topic_id);
    at_id bigint;
    at_time timestamptz;
    part record;
    probe_id bigint;
    probe_time timestamptz;
    below bigint;
    above bigint;
begin
    if target = '"beginning"' then
        return coalesce((
            select min(s.low) from weir.segment as s where s.topic_id = position.topic_id and s.emptied_at is null
        ) - 1, 0);
    elsif target = '"head"' then
        return settled;
    elsif jsonb_typeof(target) = 'object' and target ? 'id' and target ->> 'id' ~ '^[0-9]{1,18}$' then
        at_id := (target ->> 'id')::bigint - 1;
        -- What has just been produced may need a moment to be settled.
        for turn in 1..50 loop
            exit when at_id <= settled or at_id > weir.drawn(topic_id) or not weir.may_look();
            perform pg_sleep(0.02);
            settled := weir.settled_head(topic_id);
        end loop;
        if at_id not between 0 and settled then
            raise exception '% is id %, it must be from 1 to the settled head + 1, %', field, at_id + 1, settled + 1
                using errcode = 'WE003', hint = 'Use "head" to wait for what comes next.';
        end if;
        return at_id;
    elsif jsonb_typeof(target) = 'object' and jsonb_typeof(target -> 'time') = 'string' then
        begin
            at_time := (target ->> 'time')::timestamptz;
        exception
            when invalid_datetime_format or datetime_field_overflow or invalid_parameter_value then
                raise exception '% has the time %, which cannot be read', field, target -> 'time'
                    using errcode = 'WE003', hint = 'Write it as "2026-01-31T12:00:00Z".';
        end;
        for part in
            select s.number, s.low, s.high
            from weir.segment as s
            where s.topic_id = position.topic_id and s.low <= settled and s.emptied_at is null
            order by s.high
        loop
            -- The first id of this segment whose message is not older than at_time, if any.
            execute format('select id, produced_at from weir.log_%s_%s order by id desc limit 1', topic_id, part.number) into probe_id, probe_time;
            continue when probe_id is null or probe_time < at_time;
            below := part.low - 1;
            above := probe_id;
            while above > below + 1 loop
                execute format('select id, produced_at from weir.log_%s_%s where id > $1 and id < $2 order by id limit 1', topic_id, part.number)
                into probe_id, probe_time using (below + above) / 2, above;
                if probe_id is null then
                    -- Nothing in the upper half: look from the lower half up to its middle.
                    execute format('select id, produced_at from weir.log_%s_%s where id > $1 and id <= $2 order by id desc limit 1', topic_id, part.number)
                    into probe_id, probe_time using below, (below + above) / 2;
                    exit when probe_id is null;
                end if;
                if probe_time < at_time then
                    below := probe_id;
                else
                    above := probe_id;
                end if;
            end loop;
            return least(above - 1, settled);
        end loop;
        return settled;
    end if;
    raise exception '% is %, which is no position', field, coalesce(target::text, 'null')
        using errcode = 'WE003', hint = 'Use "beginning", "head", {"id": 42} or {"time": "2026-01-31T12:00:00Z"}.';
end
$$;

-- weir.settled_head(topic_id): the settled head, after an attempt to move it on (not on a standby, nor in a read-only
-- transaction).
create or replace function weir.settled_head(topic_id int) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
declare
    f record;
    look boolean;
    visible bigint;
begin
    select max(r.bound) as bound, max(r.pending) as pending, bool_and(r.overdue) filter (where r.pending is not null) as overdue,
        pg_current_xact_id_if_assigned() is null as no_xid
    into f
    from weir.fence_rows as r
    where r.topic_id = settled_head.topic_id;
    if f.pending <= f.bound then
        f.pending := null;
    end if;
    look := f.pending is not null and f.overdue and weir.may_look();
    if (f.pending is null or look) and not pg_is_in_recovery() and current_setting('transaction_read_only') = 'off' then
        visible := weir.head(topic_id, f.bound);
        if visible is not null then
            return weir.settle(topic_id, visible, f.no_xid, look or not f.no_xid and weir.may_look());
        end if;
    end if;
    return f.bound;
end
$$;

-- weir.may_look(): whether a proof by lock is sound in this transaction: each of its statements must have a snapshot of its
-- own.
create or replace function weir.may_look() returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$ select current_setting('transaction_isolation') in ('read committed', 'read uncommitted') $$;
