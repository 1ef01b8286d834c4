-- Schema step 1: topics and their logs, the fence, groups with their cursors, leases and deliveries.
--
-- The hot tables (fence, cursor, lease) are narrow, of fixed width and only half filled, so that their updates stay on
-- the page (HOT) and touch no index.

create table weir.meta (
    only_row boolean primary key default true constraint meta_one_row check (only_row),
    -- number of the last schema step that was run
    version int not null,
    -- lowest library version that can work on this schema
    compatible int not null,
    -- checksum of the functions and views that are installed
    functions text not null default '',
    changed_at timestamptz not null default clock_timestamp()
);

-- One row a topic. Its log is the table weir.log_<id>, its sequence weir.log_<id>_id: named by number, so that a topic
-- can bear any name and be renamed without touching the log.
create table weir.topic (
    id int generated always as identity primary key,
    name text not null constraint topic_name_unique unique,
    format text not null constraint topic_format check (format in ('json', 'jsonb', 'bytes')),
    -- weir.log_<id>_id, by its oid: the hot path reads it in a plan that is kept
    sequence regclass not null,
    -- ids a segment holds
    segment_size bigint not null constraint topic_segment_size check (segment_size between 1000 and 1000000000),
    created_at timestamptz not null default clock_timestamp()
);

-- One row a segment: the table weir.log_<topic_id>_<number> holds the ids low <= id < high.
create table weir.segment (
    topic_id int not null references weir.topic (id),
    number int not null,
    low bigint not null,
    high bigint not null,
    created_at timestamptz not null default clock_timestamp(),
    primary key (topic_id, high),
    constraint segment_low_unique unique (topic_id, low),
    constraint segment_number_unique unique (topic_id, number),
    constraint segment_bounds check (low < high)
);

-- What is proven of a topic's log, and the pair that waits for its proof. A topic has one row, and more only while
-- transactions hold the others locked: whoever finds all of them locked adds one, so that a claim inside a long
-- transaction never makes another group wait. The settled head is the maximum over a topic's rows (weir.fence_rows).
create table weir.fence (
    topic_id int not null references weir.topic (id),
    slot int not null,
    -- proven: nothing at or below it can still appear
    settled bigint not null,
    -- the pair: head becomes settled once every transaction below xid has finished, or once all of holders have
    head bigint not null,
    xid xid8,
    holders xid8[],
    -- pg_postmaster_start_time() of the server that saw the holders
    boot timestamptz,
    observed_at timestamptz not null default clock_timestamp(),
    primary key (topic_id, slot)
) with (fillfactor = 50);

create table weir.consumer_group (
    id int generated always as identity primary key,
    topic_id int not null references weir.topic (id),
    name text not null,
    mode text not null constraint group_mode check (mode in ('stream')),
    -- attempts after which a message is dead
    max_attempts int not null constraint group_max_attempts check (max_attempts between 1 and 1000),
    -- delay before the second attempt; doubles with each further one, up to retry_max
    retry_delay interval not null,
    retry_max interval not null,
    -- takeovers after which a range is split into deliveries
    split_after int not null constraint group_split_after check (split_after between 1 and 1000),
    created_at timestamptz not null default clock_timestamp(),
    constraint group_name_unique unique (topic_id, name)
);

-- How far a group has claimed. Locked only for the length of a claim.
create table weir.cursor (
    group_id int primary key references weir.consumer_group (id),
    claimed bigint not null
) with (fillfactor = 50);

-- Numbers for leases, of ranges and of deliveries alike. A takeover draws a new one: a holder is known by the number.
create sequence weir.lease_id as bigint cache 1 no cycle;

-- One row a claimed range (low, high]. Gone when it is acknowledged.
create table weir.lease (
    id bigint primary key default nextval('weir.lease_id'),
    group_id int not null references weir.consumer_group (id),
    low bigint not null,
    high bigint not null,
    consumer text not null,
    -- 1 for the first holder, one more with each takeover
    attempt int not null,
    claimed_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    -- ids of the range that need no further handling: turned into deliveries, or handled before a release
    done bigint[],
    constraint lease_bounds check (low < high)
) with (fillfactor = 50);
create index lease_expiry on weir.lease (group_id, expires_at);

-- One row a message that needs attention of its own, with a copy of it: it pins no segment.
create table weir.delivery (
    group_id int not null references weir.consumer_group (id),
    message_id bigint not null,
    -- ready: waits for due_at; leased: held until due_at; dead: waits for a person
    state text not null constraint delivery_state check (state in ('ready', 'leased', 'dead')),
    -- when it can be claimed: the time of its retry, or the end of its lease
    due_at timestamptz not null,
    -- attempts begun
    attempt int not null,
    -- its last lease expired: it may be what brought its process down, so a consumer gets one of its kind at a time
    suspect boolean not null default false,
    lease_id bigint,
    consumer text,
    key text,
    headers jsonb,
    payload json,
    data bytea,
    produced_at timestamptz not null,
    -- one object an attempt that failed: attempt, at, error
    errors jsonb not null default '[]',
    created_at timestamptz not null default clock_timestamp(),
    primary key (group_id, message_id),
    constraint delivery_leased check ((state = 'leased') = (lease_id is not null))
) with (fillfactor = 70);
create index delivery_due on weir.delivery (group_id, due_at) where state <> 'dead';
create index delivery_suspect on weir.delivery (group_id, due_at) where suspect and state <> 'dead';
create unique index delivery_lease on weir.delivery (lease_id) where lease_id is not null;
create index delivery_dead on weir.delivery (group_id, message_id) where state = 'dead';
