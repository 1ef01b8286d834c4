-- weir.create_group(topic, grp, options): makes a consumer group on a topic; returns its number.
--
-- grp      1 to 200 characters, no control characters, unique on the topic
-- options  mode          stream (default): ranges, several at once
--                        ordered: per key in id order and one at a time, retries included
--                        queue: every message by itself, by priority
--          start         "beginning" (default), "head", {"id": n} (n is the first id it gets) or {"time": "2026-01-31T12:00:00Z"}
--          shards        of an ordered group: how many keys at most are handled at once across all consumers; a power of two,
--                        1 to 256, default 16
--          key_prefix    only messages whose key begins so
--          headers       only messages whose headers contain these, a JSON object
--          max_attempts  attempts after which a message is dead, 1 to 1000, default 10
--          retry_delay   before the second attempt, default "1 s"; doubles with each further one
--          retry_max     the longest delay, default "10 min"
--          split_after   takeovers after which a range is split into single deliveries, 1 to 1000, default 3
--
-- A group of that name that exists is left as it is, so any number of processes may call this at once.
-- Errors: WE001, WE003, WE004 (it exists with another mode), WE006. Locks: two advisory locks, until the transaction
-- ends.
create or replace function weir.create_group(topic text, grp text, options jsonb default '{}') returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    on_topic weir.topic;
    wanted weir.consumer_group;
    found_group weir.consumer_group;
    first_claimed bigint;
begin
    perform weir.check_primary();
    perform weir.check_name('group', grp);
    on_topic := weir.topic_named(topic);
    perform weir.check_options(options, array[
        'mode', 'start', 'shards', 'key_prefix', 'headers', 'max_attempts', 'retry_delay', 'retry_max', 'split_after'
    ]);
    wanted.mode := coalesce(options ->> 'mode', 'stream');
    if wanted.mode not in ('stream', 'ordered', 'queue') then
        raise exception 'option mode is %, it must be stream, ordered or queue', quote_literal(wanted.mode)
            using errcode = 'WE003', hint = 'Leave mode out for stream.';
    end if;
    if wanted.mode = 'ordered' then
        wanted.shards := 16;
    end if;
    wanted.max_attempts := 10;
    wanted.retry_delay := '1 s';
    wanted.split_after := 3;
    wanted := weir.group_options(wanted, options);

    select g.* into found_group from weir.consumer_group as g where g.topic_id = on_topic.id and g.name = grp;
    if found_group.id is null then
        perform pg_advisory_xact_lock(hashtextextended('weir.create_group', on_topic.id));
        select g.* into found_group from weir.consumer_group as g where g.topic_id = on_topic.id and g.name = grp;
    end if;
    if found_group.id is not null then
        if options ? 'mode' and found_group.mode <> wanted.mode then
            raise exception 'group % exists with mode %, not %', quote_literal(grp), found_group.mode, wanted.mode
                using errcode = 'WE004', hint = 'Use the mode it has, or choose another name.';
        end if;
        return found_group.id;
    end if;

    -- From here on nothing is removed that the group needs (weir.retain).
    perform pg_advisory_xact_lock_shared(weir.gate(on_topic.id));
    first_claimed := weir.position(on_topic.id, coalesce(options -> 'start', '"beginning"'), 'option start');
    insert into weir.consumer_group
        (topic_id, name, mode, shards, key_prefix, header_match, max_attempts, retry_delay, retry_max, split_after)
    values (
        on_topic.id, grp, wanted.mode, wanted.shards, wanted.key_prefix, wanted.header_match, wanted.max_attempts,
        wanted.retry_delay, wanted.retry_max, wanted.split_after
    )
    returning * into found_group;
    insert into weir.shard (group_id, number)
    select found_group.id, n from generate_series(0, found_group.shards - 1) as n;
    insert into weir.cursor (group_id, claimed) values (found_group.id, first_claimed);
    return found_group.id;
end
$$;

-- weir.group_options(base, options): base with what options say of it. Errors: WE003.
create or replace function weir.group_options(base weir.consumer_group, options jsonb) returns weir.consumer_group
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    given_max boolean := options ? 'retry_max' and options -> 'retry_max' <> 'null';
    number bigint;
begin
    number := weir.option_number(options, 'max_attempts', base.max_attempts);
    perform weir.check_range('option max_attempts', number, 1, 1000);
    base.max_attempts := number;
    number := weir.option_number(options, 'split_after', base.split_after);
    perform weir.check_range('option split_after', number, 1, 1000);
    base.split_after := number;
    base.retry_delay := weir.option_interval(options, 'retry_delay', base.retry_delay);
    perform weir.check_interval('option retry_delay', base.retry_delay, '0 s', '7 days');
    base.retry_max := weir.option_interval(
        options, 'retry_max', greatest(coalesce(base.retry_max, interval '10 min'), base.retry_delay));
    if given_max or base.retry_max is not null then
        perform weir.check_interval('option retry_max', base.retry_max, base.retry_delay, '30 days');
    end if;

    number := weir.option_number(options, 'shards', base.shards);
    if number is not null and base.mode <> 'ordered' then
        raise exception 'option shards is %, but only an ordered group has shards', number
            using errcode = 'WE003', hint = 'Leave shards out, or create the group with mode ordered.';
    end if;
    if number is not null and (number not between 1 and 256 or number & (number - 1) <> 0) then
        raise exception 'option shards is %, it must be a power of two from 1 to 256', number
            using errcode = 'WE003', hint = 'Use 1, 2, 4, 8, 16, 32, 64, 128 or 256.';
    end if;
    base.shards := number;

    if options ? 'key_prefix' then
        if jsonb_typeof(options -> 'key_prefix') not in ('string', 'null') or octet_length(options ->> 'key_prefix') > 1024 then
            raise exception 'option key_prefix must be a text of at most 1024 bytes'
                using errcode = 'WE003', hint = 'Leave key_prefix out for messages of every key.';
        end if;
        base.key_prefix := nullif(options ->> 'key_prefix', '');
    end if;
    if options ? 'headers' then
        if jsonb_typeof(options -> 'headers') not in ('object', 'null') then
            raise exception 'option headers is %, it must be a JSON object', options -> 'headers'
                using errcode = 'WE003', hint = 'Leave headers out for messages of all headers.';
        end if;
        base.header_match := nullif(nullif(options -> 'headers', 'null'), '{}');
    end if;
    return base;
end
$$;
