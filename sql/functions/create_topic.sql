-- weir.create_topic(topic, options): makes a topic with its log and sequence; returns its number.
--
-- topic    1 to 200 characters, no control characters, unique
-- options  format           json (default: the text as it was given), jsonb, or bytes
--          segment_size     ids per segment, 1,000 to 1,000,000,000, default 1,000,000
--          idempotency_ttl  how long an idempotency key is remembered, 1 s to 365 days, default 1 day
--          retention_age    messages are kept that long at least, and removed soon after, 1 s to 100 years; default for ever
--          retention_bytes  and, or instead, so many bytes of them, indexes included; default without limit
--          drop_unread      retention also removes what a group has yet to finish (weir.groups.missed counts it), default false
--          compact          only the latest message of each key is kept; each message has a key, and one whose payload is null
--                           is a tombstone: its key is gone. Cannot be changed later, default false
--          tombstone_ttl    how long a tombstone is kept, default 1 day
--          restricted       who produces needs INSERT on the log's column payload besides EXECUTE, who claims or reads needs SELECT on it,
--                           default false
--
-- A topic of that name that exists with the same format is left as it is, so any number of processes may call this at
-- once. Errors: WE003 (a bad name or option), WE004 (it exists with another format), WE006 (a standby).
-- Locks: an advisory lock of this install, until the transaction ends.
create or replace function weir.create_topic(topic text, options jsonb default '{}') returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    found_topic weir.topic;
    new_id int;
    wanted weir.topic;
begin
    perform weir.check_primary();
    perform weir.check_name('topic', topic);
    perform weir.check_options(options, array[
        'format', 'segment_size', 'idempotency_ttl', 'retention_age', 'retention_bytes', 'drop_unread', 'compact', 'tombstone_ttl',
        'restricted'
    ]);
    wanted.format := coalesce(options ->> 'format', 'json');
    if wanted.format not in ('json', 'jsonb', 'bytes') then
        raise exception 'option format is %, it must be json, jsonb or bytes', quote_literal(wanted.format)
            using errcode = 'WE003', hint = 'json keeps the text as it was given, jsonb is for queries, bytes is for anything else.';
    end if;
    wanted.segment_size := 1000000;
    wanted.idempotency_ttl := '1 day';
    wanted.tombstone_ttl := '1 day';
    wanted.drop_unread := false;
    wanted.compact := false;
    wanted.restricted := false;
    wanted := weir.topic_options(wanted, options);

    -- Before the advisory lock, so that the common case takes none.
    select t.* into found_topic from weir.topic as t where t.name = create_topic.topic;
    if found_topic.id is null then
        perform pg_advisory_xact_lock(hashtextextended('weir.create_topic', 0));
        select t.* into found_topic from weir.topic as t where t.name = create_topic.topic;
    end if;
    if found_topic.id is not null then
        if options ? 'format' and found_topic.format <> wanted.format then
            raise exception 'topic % exists with format %, not %', quote_literal(topic), found_topic.format, wanted.format
                using errcode = 'WE004', hint = 'Use the format it has, or choose another name.';
        end if;
        if options ? 'compact' and found_topic.compact <> wanted.compact then
            raise exception 'topic % exists and is %', quote_literal(topic), case when found_topic.compact then 'compacted' else 'not compacted' end
                using errcode = 'WE004', hint = 'Use it as it is, or choose another name.';
        end if;
        return found_topic.id;
    end if;

    new_id := nextval(pg_get_serial_sequence('weir.topic', 'id'));
    execute format('create sequence weir.log_%s_id as bigint increment 1 minvalue 1 start 1 cache 1 no cycle', new_id);
    insert into weir.topic (
        id, name, format, sequence, segment_size, idempotency_ttl, retention_age, retention_bytes, drop_unread, compact, tombstone_ttl,
        restricted
    )
    overriding system value
    values (
        new_id, topic, wanted.format, format('weir.log_%s_id', new_id)::regclass, wanted.segment_size, wanted.idempotency_ttl,
        wanted.retention_age, wanted.retention_bytes, wanted.drop_unread, wanted.compact, wanted.tombstone_ttl,
        wanted.restricted
    );
    -- The id default is the producer's half of the fence: the xid is taken before the id is drawn, whatever client writes
    -- the row and however. Taken after it (nextval alone takes none), a producer could own an id below a head that was
    -- read by an observer with a lower xid.
    execute format(
        'create table weir.log_%1$s (
            id bigint not null default case when pg_current_xact_id() is not null then nextval(''weir.log_%1$s_id'') end,
            produced_at timestamptz not null default clock_timestamp(),
            key text %4$s constraint log_key check (octet_length(key) <= 1024),
            headers jsonb constraint log_headers check (jsonb_typeof(headers) = ''object''),
            payload %2$s %3$s,
            deliver_at timestamptz constraint log_deliver_at check (isfinite(deliver_at) and deliver_at < ''10000-01-01 00:00:00+00''),
            priority smallint constraint log_priority check (priority between -10 and 10),
            timeout interval constraint log_timeout check (timeout > interval ''0 s'' and timeout <= interval ''7 days''),
            constraint log_%1$s_pk primary key (id)
        ) partition by range (id)',
        new_id, case wanted.format when 'bytes' then 'bytea' else wanted.format end,
        case when not wanted.compact then 'not null' end, case when wanted.compact then 'not null' end);
    if wanted.compact then
        execute format('create index log_%1$s_key on weir.log_%1$s (key, id)', new_id);
        execute format('create index log_%1$s_tombstone on weir.log_%1$s (id) where payload is null', new_id);
    end if;
    execute format('alter sequence weir.log_%1$s_id owned by weir.log_%1$s.id', new_id);
    insert into weir.fence (topic_id, slot, settled, head) values (new_id, 0, 0, 0);
    perform weir.extend_log(new_id, 1);
    perform weir.make_insert(t) from weir.topic as t where t.id = new_id;
    return new_id;
end
$$;
