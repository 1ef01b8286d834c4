-- weir.check_name(field, value): refuses, with WE003, a name that could not be told apart or typed in a terminal.
create or replace function weir.check_name(field text, value text) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if value is null or value = '' or char_length(value) > 200 then
        raise exception '% must have 1 to 200 characters, it has %', field, coalesce(char_length(value), 0)
            using errcode = 'WE003', hint = 'Choose a shorter, non-empty name.';
    end if;
    if value ~ '[[:cntrl:]]' or value <> btrim(value) then
        raise exception '% must not contain control characters nor begin or end with a space', field
            using errcode = 'WE003', hint = 'Any other character is allowed: dots, quotes, capitals, spaces within, non-ASCII.';
    end if;
end
$$;

-- weir.check_range(field, value, low, high): refuses, with WE003, a value that is null or not within low and high.
create or replace function weir.check_range(field text, value numeric, low numeric, high numeric) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if value is null or value not between low and high then
        raise exception '% is %, it must be from % to %', field, coalesce(value::text, 'null'), low, high
            using errcode = 'WE003', hint = format('Give %s a value within that range.', field);
    end if;
end
$$;

-- weir.check_interval(field, value, low, high): the same for a length of time.
create or replace function weir.check_interval(field text, value interval, low interval, high interval) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if value is null or value not between low and high then
        raise exception '% is %, it must be from % to %', field, coalesce(value::text, 'null'), low, high
            using errcode = 'WE003', hint = format('Give %s a length of time within that range.', field);
    end if;
end
$$;

-- weir.check_options(options, allowed): refuses, with WE003, options that are no JSON object or have an unknown name.
create or replace function weir.check_options(options jsonb, allowed text[]) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
    unknown text;
begin
    if options is null or jsonb_typeof(options) <> 'object' then
        raise exception 'options must be a JSON object'
            using errcode = 'WE003', hint = format('Known options: %s.', array_to_string(allowed, ', '));
    end if;
    select k into unknown from jsonb_object_keys(options) as k where k <> all (allowed) order by k limit 1;
    if unknown is not null then
        raise exception 'unknown option %', quote_literal(unknown)
            using errcode = 'WE003', hint = format('Known options: %s.', array_to_string(allowed, ', '));
    end if;
end
$$;

-- weir.option_number(options, field, fallback): a whole number among options, fallback where it is absent; WE003 where it
-- is something else.
create or replace function weir.option_number(options jsonb, field text, fallback bigint) returns bigint
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if not options ? field or options -> field = 'null' then
        return fallback;
    end if;
    if (options ->> field) !~ '^-?[0-9]{1,18}$' then
        raise exception 'option % is %, it must be a whole number', field, options -> field
            using errcode = 'WE003', hint = format('Give %s a whole number, or leave it out for %s.', field, fallback);
    end if;
    return (options ->> field)::bigint;
end
$$;

-- weir.option_interval(options, field, fallback): a length of time among options, such as "5 s"; fallback where it is
-- absent; WE003 where it is something else.
create or replace function weir.option_interval(options jsonb, field text, fallback interval) returns interval
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if not options ? field or options -> field = 'null' then
        return fallback;
    end if;
    return (options ->> field)::interval;
exception
    when invalid_datetime_format or datetime_field_overflow or interval_field_overflow then
        raise exception 'option % is %, it must be a length of time', field, options -> field
            using errcode = 'WE003', hint = format('Write it as "5 s", "10 min" or "2 h", or leave it out for %s.', fallback);
end
$$;
