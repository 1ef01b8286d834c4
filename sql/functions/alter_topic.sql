-- weir.alter_topic(topic, options): changes options of a topic: segment_size, retention_age, retention_bytes (null for none), drop_unread,
-- idempotency_ttl, tombstone_ttl, restricted, as weir.create_topic has them. Those that are not given stay.
--
-- Errors: WE001, WE003, WE006. Locks: the topic's row.
create or replace function weir.alter_topic(topic text, options jsonb) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    was weir.topic := weir.topic_named(topic);
    wanted weir.topic;
begin
    perform weir.check_primary();
    perform weir.check_options(options, array[
        'segment_size', 'retention_age', 'retention_bytes', 'drop_unread', 'idempotency_ttl', 'tombstone_ttl', 'restricted'
    ]);
    select t.* into was from weir.topic as t where t.id = was.id for no key update;
    wanted := weir.topic_options(was, options);
    update weir.topic as t
    set segment_size = wanted.segment_size, retention_age = wanted.retention_age, retention_bytes = wanted.retention_bytes,
        drop_unread = wanted.drop_unread, idempotency_ttl = wanted.idempotency_ttl, tombstone_ttl = wanted.tombstone_ttl,
        restricted = wanted.restricted
    where t.id = was.id;
end
$$;

-- weir.topic_options(base, options): base with what options say of it. Errors: WE003.
create or replace function weir.topic_options(base weir.topic, options jsonb) returns weir.topic
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    flag text;
begin
    base.segment_size := weir.option_number(options, 'segment_size', base.segment_size);
    perform weir.check_range('option segment_size', base.segment_size, 1000, 1000000000);
    if options ? 'retention_age' then
        base.retention_age := weir.option_interval(options, 'retention_age', null);
        if base.retention_age is not null then
            perform weir.check_interval('option retention_age', base.retention_age, '1 s', '100 years');
        end if;
    end if;
    if options ? 'retention_bytes' then
        base.retention_bytes := weir.option_number(options, 'retention_bytes', null);
        if base.retention_bytes is not null then
            perform weir.check_range('option retention_bytes', base.retention_bytes, 1, 9e18);
        end if;
    end if;
    base.idempotency_ttl := weir.option_interval(options, 'idempotency_ttl', base.idempotency_ttl);
    perform weir.check_interval('option idempotency_ttl', base.idempotency_ttl, '1 s', '365 days');
    base.tombstone_ttl := weir.option_interval(options, 'tombstone_ttl', base.tombstone_ttl);
    perform weir.check_interval('option tombstone_ttl', base.tombstone_ttl, '0 s', '100 years');
    foreach flag in array array['drop_unread', 'compact', 'restricted'] loop
        if options ? flag and jsonb_typeof(options -> flag) not in ('boolean', 'null') then
            raise exception 'option % is %, it must be true or false', flag, options -> flag
                using errcode = 'WE003', hint = format('Leave %s out for false.', flag);
        end if;
    end loop;
    base.drop_unread := coalesce((options ->> 'drop_unread')::boolean, base.drop_unread);
    base.compact := coalesce((options ->> 'compact')::boolean, base.compact);
    base.restricted := coalesce((options ->> 'restricted')::boolean, base.restricted);
    return base;
end
$$;

-- weir.rename_topic(topic, new_name): gives a topic another name. Its log and groups stay; producers and consumers that use the old name
-- get WE001 at their next call. Errors: WE001, WE003, WE004 (the new name is another topic's), WE006.
create or replace function weir.rename_topic(topic text, new_name text) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    of_topic weir.topic := weir.topic_named(topic);
begin
    perform weir.check_primary();
    perform weir.check_name('new_name', new_name);
    update weir.topic as t set name = new_name where t.id = of_topic.id;
exception
    when unique_violation then
        raise exception 'topic % exists', quote_literal(new_name)
            using errcode = 'WE004', hint = 'Choose another name, or drop that topic first.';
end
$$;
