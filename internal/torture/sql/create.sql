-- What a torture keeps in the database beside Weir: the ledger, the effects, and how each lease ended.
create schema weir_torture;
comment on schema weir_torture is 'made by weir torture';

-- A row a transaction that produced: its messages have the values first, first + 1, ...
create table weir_torture.ledger (
    topic int not null,
    first bigint not null,
    ids bigint[] not null
);

-- What effectively-once handlers do: a row a transaction, of messages with their values and leases.
create table weir_torture.effect (
    grp int not null,
    consumer int not null,
    ids bigint[] not null,
    vals bigint[] not null,
    leases text[] not null,
    at timestamptz not null default clock_timestamp()
);

-- How leases ended: written by triggers, in the transaction that ended them.
create table weir_torture.lease_end (
    lease text not null,
    how text not null,
    -- when it was noted, and when the statement began that did it
    at timestamptz not null,
    asked_at timestamptz not null,
    expires_at timestamptz not null
);

-- Since when a delivery is leased, which Weir does not keep: written by a trigger, in the transaction that leased it.
create table weir_torture.leased (
    lease_id bigint primary key,
    claimed_at timestamptz not null default clock_timestamp()
);

-- Names of leases. A crash can lose a claim, whose number is then given out again: the time makes it another lease.
create function weir_torture.lease_name(id bigint, claimed_at timestamptz) returns text
language sql stable
as $$ select id || '/' || (extract(epoch from claimed_at) * 1000000)::bigint $$;

create function weir_torture.delivery_name(id bigint, message bigint, claimed_at timestamptz) returns text
language sql stable
as $$ select 'd' || id || '/' || message || '/' || (extract(epoch from claimed_at) * 1000000)::bigint $$;

-- weir_torture.held(of_group, of_consumer, ids, attempts): under which lease of its own a consumer has each message in that attempt,
-- at this moment; null for none.
create function weir_torture.held(of_group int, of_consumer text, ids bigint[], attempts int[]) returns setof text
language plpgsql volatile
as $$
begin
    return query
    select coalesce(
        (
            select weir_torture.lease_name(l.id, l.claimed_at)
            from weir.lease as l
            where l.group_id = of_group and l.consumer = of_consumer and l.expires_at > clock_timestamp()
              and m.attempt = l.attempt + case
                  when l.shard is null and m.id > l.low and m.id <= l.high and m.id <> all (coalesce(l.done, '{}')) then 0
                  when m.id = any (l.ids) and m.id <> all (coalesce(l.done, '{}')) then 0
                  when m.id = any (l.retries)
                  then (select d.attempt from weir.delivery as d where d.group_id = l.group_id and d.message_id = m.id)
              end
            limit 1
        ),
        (
            select weir_torture.delivery_name(d.lease_id, d.message_id, l.claimed_at)
            from weir.delivery as d
            join weir_torture.leased as l on l.lease_id = d.lease_id
            where d.group_id = of_group and d.message_id = m.id and d.state = 'leased' and d.consumer = of_consumer
              and d.attempt = m.attempt and d.due_at > clock_timestamp()
        )
    )
    from unnest(ids, attempts) with ordinality as m (id, attempt, n)
    order by m.n;
end
$$;

create function weir_torture.note_lease() returns trigger
language plpgsql security definer
as $$
declare
    stack text;
    how text := 'taken over';
begin
    if tg_op = 'DELETE' then
        get diagnostics stack = pg_context;
        how := case
            when stack ~ 'ack_(many|messages)' then 'acknowledged'
            when stack ~ 'take_over' then 'split'
            else 'ended'
        end;
    elsif old.id = new.id then
        return null;
    end if;
    insert into weir_torture.lease_end (lease, how, at, asked_at, expires_at)
    values (weir_torture.lease_name(old.id, old.claimed_at), how, clock_timestamp(), statement_timestamp(), old.expires_at);
    return null;
end
$$;
create trigger weir_torture_lease after delete or update of id on weir.lease
for each row execute function weir_torture.note_lease();

create function weir_torture.note_claim() returns trigger
language plpgsql security definer
as $$
begin
    insert into weir_torture.leased (lease_id) values (new.lease_id);
    return null;
end
$$;
create trigger weir_torture_delivery_made after insert on weir.delivery
for each row when (new.lease_id is not null) execute function weir_torture.note_claim();
create trigger weir_torture_delivery_claimed after update of lease_id on weir.delivery
for each row when (new.lease_id is not null and new.lease_id is distinct from old.lease_id)
execute function weir_torture.note_claim();

create function weir_torture.note_delivery() returns trigger
language plpgsql security definer
as $$
declare
    stack text;
    how text;
begin
    get diagnostics stack = pg_context;
    how := case
        when tg_op = 'DELETE' and stack ~ 'ack_(many|messages)' then 'acknowledged'
        when old.due_at <= clock_timestamp() then 'taken over'
        else 'ended'
    end;
    with ended as (
        delete from weir_torture.leased as l where l.lease_id = old.lease_id
        returning l.claimed_at
    )
    insert into weir_torture.lease_end (lease, how, at, asked_at, expires_at)
    select
        weir_torture.delivery_name(old.lease_id, old.message_id, e.claimed_at), how, clock_timestamp(), statement_timestamp(), old.due_at
    from ended as e;
    return null;
end
$$;
create trigger weir_torture_delivery_gone after delete on weir.delivery
for each row when (old.lease_id is not null) execute function weir_torture.note_delivery();
create trigger weir_torture_delivery_left after update of lease_id on weir.delivery
for each row when (old.lease_id is not null and new.lease_id is distinct from old.lease_id)
execute function weir_torture.note_delivery();
