-- weir.create_topic(topic, options): makes a topic with its log and sequence; returns its number.
--
-- topic    1 to 200 characters, no control characters, unique
-- options  format        json (default: the text as it was given), jsonb, or bytes
--          segment_size  ids per segment, 1,000 to 1,000,000,000, default 1,000,000
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
    wanted_format text;
    size bigint;
begin
    perform weir.check_primary();
    perform weir.check_name('topic', topic);
    perform weir.check_options(options, array['format', 'segment_size']);
    wanted_format := coalesce(options ->> 'format', 'json');
    if wanted_format not in ('json', 'jsonb', 'bytes') then
        raise exception 'option format is %, it must be json, jsonb or bytes', quote_literal(wanted_format)
            using errcode = 'WE003', hint = 'json keeps the text as it was given, jsonb is for queries, bytes is for anything else.';
    end if;
    size := weir.option_number(options, 'segment_size', 1000000);
    perform weir.check_range('option segment_size', size, 1000, 1000000000);

    -- Before the advisory lock, so that the common case takes none.
    select t.* into found_topic from weir.topic as t where t.name = create_topic.topic;
    if found_topic.id is null then
        perform pg_advisory_xact_lock(hashtextextended('weir.create_topic', 0));
        select t.* into found_topic from weir.topic as t where t.name = create_topic.topic;
    end if;
    if found_topic.id is not null then
        if options ? 'format' and found_topic.format <> wanted_format then
            raise exception 'topic % exists with format %, not %', quote_literal(topic), found_topic.format, wanted_format
                using errcode = 'WE004', hint = 'Use the format it has, or choose another name.';
        end if;
        return found_topic.id;
    end if;

    new_id := nextval(pg_get_serial_sequence('weir.topic', 'id'));
    execute format('create sequence weir.log_%s_id as bigint increment 1 minvalue 1 start 1 cache 1 no cycle', new_id);
    insert into weir.topic (id, name, format, sequence, segment_size) overriding system value
    values (new_id, topic, wanted_format, format('weir.log_%s_id', new_id)::regclass, size);
    -- The id default is the producer's half of the fence: the xid is taken before the id is drawn, whatever client writes
    -- the row and however. Taken after it (nextval alone takes none), a producer could own an id below a head that was
    -- read by an observer with a lower xid.
    execute format(
        'create table weir.log_%1$s (
            id bigint not null default case when pg_current_xact_id() is not null then nextval(''weir.log_%1$s_id'') end,
            produced_at timestamptz not null default clock_timestamp(),
            key text,
            headers jsonb constraint log_headers check (jsonb_typeof(headers) = ''object''),
            payload %2$s not null,
            deliver_at timestamptz,
            priority smallint,
            timeout interval,
            constraint log_%1$s_pk primary key (id)
        ) partition by range (id)',
        new_id, case wanted_format when 'bytes' then 'bytea' else wanted_format end);
    execute format('alter sequence weir.log_%1$s_id owned by weir.log_%1$s.id', new_id);
    insert into weir.fence (topic_id, slot, settled, head) values (new_id, 0, 0, 0);
    perform weir.extend_log(new_id, size);
    return new_id;
end
$$;
