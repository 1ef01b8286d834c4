-- Schema step 3: times, priorities and time limits of messages, idempotency keys, and the batches of producers.

-- What has other arguments now is made anew right after the steps. In a new install it is not there yet.
drop function if exists weir.produce(text, json, text, jsonb);
drop function if exists weir.produce_bytes(text, bytea, text, jsonb);
drop function if exists weir.produce_many(text, json[], text[], jsonb[]);
drop function if exists weir.produce_many_bytes(text, bytea[], text[], jsonb[]);
drop function if exists weir.produce_many_sql(weir.topic, int, int, int);

alter table weir.topic
    -- how long an idempotency key is remembered
    add column idempotency_ttl interval not null default '1 day'
        constraint topic_idempotency_ttl check (idempotency_ttl between interval '1 s' and interval '365 days');

-- One row a producer and hundred of its batches. A producer is a uuid that a client has made up; the client numbers its batches
-- upward and sends one at a time. The last batch is recorded in the transaction that stores it, so that whoever repeats it
-- finds it. Updates stay on the page (HOT); but a snapshot that is held keeps every version of a row, and a look-up visits
-- them all, so each hundred begins a new row, and ends the one before.
create table weir.producer (
    id uuid not null,
    -- batch / 100
    part bigint not null,
    -- number of the last batch
    batch bigint not null,
    -- false: it was closed before it came, and is refused
    stored boolean not null,
    -- where its messages are: the ids from first_id to last_id where ids is null, else ids as weir.store_messages returns
    -- them. All null for a batch that was copied, or is not stored
    topic_id int,
    first_id bigint,
    last_id bigint,
    ids bigint[],
    at timestamptz not null default clock_timestamp(),
    primary key (id, part)
) with (fillfactor = 50);

-- One row an idempotency key that is remembered, until expires_at. Half of each page is left free, since message_id is filled
-- in by an update in the transaction that inserts the row. No foreign key, which would cost each row a look at its topic:
-- weir.drop_topic deletes the rows once the log is gone, and without a log nobody adds any.
create table weir.idempotency (
    topic_id int not null,
    key text not null,
    message_id bigint,
    expires_at timestamptz not null,
    primary key (topic_id, key)
) with (fillfactor = 50);
create index idempotency_expiry on weir.idempotency (expires_at);

-- The logs that are there get what weir.create_topic gives new ones. Their rows are not checked: they may have longer keys.
do $$
declare
    existing int;
begin
    for existing in select t.id from weir.topic as t order by t.id loop
        execute format(
            'alter table weir.log_%s
                add column deliver_at timestamptz,
                add column priority smallint,
                add column timeout interval,
                add constraint log_key check (octet_length(key) <= 1024) not valid,
                add constraint log_deliver_at check (isfinite(deliver_at) and deliver_at < ''10000-01-01 00:00:00+00'') not valid,
                add constraint log_priority check (priority between -10 and 10) not valid,
                add constraint log_timeout check (timeout > interval ''0 s'' and timeout <= interval ''7 days'') not valid',
            existing);
    end loop;
end
$$;
