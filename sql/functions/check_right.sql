-- weir.check_right(of_topic, privilege): refuses, with 42501, who has not the privilege on a restricted topic's log: INSERT on the column
-- payload to produce, SELECT on it to read. They are PostgreSQL's own, so that GRANT, REVOKE, roles in roles, \dp and pg_dump are as ever.
--
-- The role is the session's: that of SET ROLE, else the one that logged in. The functions of Weir run as their owner, and a function of
-- somebody else's that calls them changes nothing about who asks.
create or replace function weir.check_right(of_topic weir.topic, privilege text) returns void
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    asks name := coalesce(nullif(current_setting('role'), 'none')::name, session_user);
    log text := format('weir.log_%s', of_topic.id);
begin
    if not of_topic.restricted or has_column_privilege(asks, log, 'payload', privilege) then
        return;
    end if;
    raise exception 'role % may not % topic %', quote_ident(asks), case privilege when 'INSERT' then 'produce to' else 'read' end,
            quote_literal(of_topic.name)
        using errcode = '42501',
              detail = 'The topic is restricted.',
              hint = format('Run: grant %s on %s to %I;',
                  case privilege when 'INSERT' then 'insert (key, headers, payload)' else 'select (payload)' end, log, asks);
end
$$;

-- weir.check_reader(lease_ids): as weir.check_right, for whoever reads the messages of leases that are deliveries.
create or replace function weir.check_reader(lease_ids bigint[]) returns void
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
as $$
begin
    perform weir.check_right(t, 'SELECT')
    from weir.topic as t
    where t.restricted and t.id in (
        select g.topic_id from weir.delivery as d join weir.consumer_group as g on g.id = d.group_id where d.lease_id = any (lease_ids)
    );
end
$$;
