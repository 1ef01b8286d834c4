-- Schema step 2: ordered and queue groups, delayed messages, filters, pauses and presence.

-- What gets other columns or arguments is made anew right after the steps.
drop view if exists weir.blockers;
drop view if exists weir.dead_letters;
drop view if exists weir.deliveries;
drop view if exists weir.leases;
drop view if exists weir.groups;
drop view if exists weir.topics;
drop function if exists weir.poll(text, text, text, int, interval, bigint, bigint[], boolean);
drop function if exists weir.claim_range(int, int, text, bigint, text, int, interval, bigint);
drop function if exists weir.claim_deliveries(int, int, text, int, interval, bigint);
drop function if exists weir.claim_suspect(int, int, text, interval, bigint);
drop function if exists weir.take_over(int, int, int, int, text, interval);
drop function if exists weir.fetch(bigint);
drop function if exists weir.fetch_deliveries(bigint[]);
drop function if exists weir.redrive(text, text, bigint);
drop function if exists weir.purge(text, text, bigint);

alter table weir.consumer_group
    drop constraint group_mode,
    add constraint group_mode check (mode in ('stream', 'ordered', 'queue')),
    -- how many virtual shards an ordered group has: a key belongs to one of them. A power of two
    add column shards int constraint group_shards check (shards between 1 and 256 and (shards & (shards - 1)) = 0),
    -- nothing is handed out since then
    add column paused_at timestamptz,
    -- only messages whose key begins so, and whose headers contain these, are handed out
    add column key_prefix text,
    add column header_match jsonb constraint group_header_match check (jsonb_typeof(header_match) = 'object'),
    add constraint group_mode_shards check ((mode = 'ordered') = (shards is not null));

-- One row a shard of an ordered group, to be locked by whoever takes the shard. Whether it is free stands in weir.lease.
create table weir.shard (
    group_id int not null references weir.consumer_group (id),
    number int not null,
    primary key (group_id, number)
);

-- The messages of a range (low, high] of the log that belong to one shard and nobody has taken yet, by id. A shard's rows are
-- taken in the order of low.
create table weir.shard_range (
    group_id int not null references weir.consumer_group (id),
    shard int not null,
    low bigint not null,
    high bigint not null,
    ids bigint[] not null,
    -- of the payloads
    bytes bigint not null,
    -- some of them have a deliver_at
    delayed boolean not null,
    primary key (group_id, shard, low)
);

alter table weir.lease
    -- null where a shard's lease is of retries alone
    alter column low drop not null,
    alter column high drop not null,
    -- the shard of an ordered group that is held; the lease is then of ids, a part of (low, high], and of retries
    add column shard int,
    add column ids bigint[],
    -- deliveries of the shard
    add column retries bigint[];
-- One lease a shard at a time.
create unique index lease_shard on weir.lease (group_id, shard) where shard is not null;

alter table weir.delivery
    drop constraint delivery_state,
    -- parked: an earlier message of its key, in an ordered group, is to be handled first
    add constraint delivery_state check (state in ('ready', 'leased', 'parked', 'dead')),
    -- of an ordered group: the shard that it is handled with. It is then never leased by itself
    add column shard int,
    -- the higher, the sooner
    add column priority smallint not null default 0,
    -- the longest that its handler may take
    add column timeout interval;
drop index weir.delivery_due;
drop index weir.delivery_suspect;
-- When the next one can be claimed.
create index delivery_due on weir.delivery (group_id, due_at)
    where state = 'leased' or state = 'ready' and not suspect;
-- What is claimed next.
create index delivery_next on weir.delivery (group_id, priority desc, due_at)
    where shard is null and (state = 'leased' or state = 'ready' and not suspect);
create index delivery_suspect on weir.delivery (group_id, state, due_at)
    where suspect and state in ('ready', 'leased');
create index delivery_shard on weir.delivery (group_id, shard, suspect, due_at)
    where shard is not null and state = 'ready';
create index delivery_key on weir.delivery (group_id, key, state, message_id)
    where shard is not null and key is not null and state <> 'dead';

-- Who consumes. For people: nothing depends on it.
create table weir.consumer (
    group_id int not null references weir.consumer_group (id),
    name text not null,
    started_at timestamptz not null default clock_timestamp(),
    seen_at timestamptz not null default clock_timestamp(),
    -- the connection of its process that listens for wake-ups, while it is open the consumer is there
    backend int,
    backend_start timestamptz,
    -- host, process, concurrency
    about jsonb not null default '{}',
    primary key (group_id, name)
) with (fillfactor = 50);
