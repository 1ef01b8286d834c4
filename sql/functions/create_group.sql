-- weir.create_group(topic, grp, options): makes a consumer group on a topic; returns its number.
--
-- grp      1 to 200 characters, no control characters, unique on the topic
-- options  mode          stream (default)
--          start         "beginning" (default), "head", {"id": n} (n is the first id it gets) or {"time": "2026-01-31T12:00:00Z"}
--          max_attempts  attempts after which a message is dead, 1 to 1000, default 10
--          retry_delay   before the second attempt, default "1 s"; doubles with each further one
--          retry_max     the longest delay, default "10 min"
--          split_after   takeovers after which a range is split into single deliveries, 1 to 1000, default 3
--
-- A group of that name that exists is left as it is, so any number of processes may call this at once.
-- Errors: WE001, WE003, WE004 (it exists with another mode), WE006. Locks: an advisory lock, until the transaction ends.
create or replace function weir.create_group(topic text, grp text, options jsonb default '{}') returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    on_topic weir.topic;
    found_group weir.consumer_group;
    wanted_mode text;
    wanted_attempts bigint;
    wanted_split bigint;
    wanted_delay interval;
    wanted_max interval;
    first_claimed bigint;
begin
    perform weir.check_primary();
    perform weir.check_name('group', grp);
    on_topic := weir.topic_named(topic);
    perform weir.check_options(options, array['mode', 'start', 'max_attempts', 'retry_delay', 'retry_max', 'split_after']);
    wanted_mode := coalesce(options ->> 'mode', 'stream');
    if wanted_mode <> 'stream' then
        raise exception 'option mode is %, it must be stream', quote_literal(wanted_mode)
            using errcode = 'WE003', hint = 'Leave mode out for stream.';
    end if;
    wanted_attempts := weir.option_number(options, 'max_attempts', 10);
    perform weir.check_range('option max_attempts', wanted_attempts, 1, 1000);
    wanted_split := weir.option_number(options, 'split_after', 3);
    perform weir.check_range('option split_after', wanted_split, 1, 1000);
    wanted_delay := weir.option_interval(options, 'retry_delay', '1 s');
    perform weir.check_interval('option retry_delay', wanted_delay, '0 s', '7 days');
    wanted_max := weir.option_interval(options, 'retry_max', greatest(interval '10 min', wanted_delay));
    perform weir.check_interval('option retry_max', wanted_max, wanted_delay, '30 days');

    select g.* into found_group from weir.consumer_group as g where g.topic_id = on_topic.id and g.name = grp;
    if found_group.id is null then
        perform pg_advisory_xact_lock(hashtextextended('weir.create_group', on_topic.id));
        select g.* into found_group from weir.consumer_group as g where g.topic_id = on_topic.id and g.name = grp;
    end if;
    if found_group.id is not null then
        if options ? 'mode' and found_group.mode <> wanted_mode then
            raise exception 'group % exists with mode %, not %', quote_literal(grp), found_group.mode, wanted_mode
                using errcode = 'WE004', hint = 'Use the mode it has, or choose another name.';
        end if;
        return found_group.id;
    end if;

    first_claimed := weir.position(on_topic.id, coalesce(options -> 'start', '"beginning"'), 'option start');
    insert into weir.consumer_group (topic_id, name, mode, max_attempts, retry_delay, retry_max, split_after)
    values (on_topic.id, grp, wanted_mode, wanted_attempts, wanted_delay, wanted_max, wanted_split)
    returning * into found_group;
    insert into weir.cursor (group_id, claimed) values (found_group.id, first_claimed);
    return found_group.id;
end
$$;
