-- weir.release(lease_id, consumer, done): gives a lease back at once; the attempt does not count.
--
-- done  ids of its messages that were handled: they are not handed out again. null for none
--
-- Returns false, and changes nothing, when it is not this consumer's any more. Locks: the lease's row.
create or replace function weir.release(lease_id bigint, consumer text, done bigint[] default null) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    held weir.lease;
begin
    update weir.lease as l
    set expires_at = clock_timestamp(),
        attempt = l.attempt - 1,
        done = nullif(coalesce(l.done, '{}') || coalesce(release.done, '{}'), '{}')
    where l.id = release.lease_id and l.consumer = release.consumer and l.expires_at > clock_timestamp()
    returning l.* into held;
    if held.id is not null then
        if held.retries && release.done then
            perform weir.end_retries(
                held.group_id, array(select i from unnest(held.retries) as i where i = any (release.done))
            );
            update weir.lease as l
            set retries = nullif(array(select i from unnest(l.retries) as i where i <> all (release.done)), '{}')
            where l.id = held.id;
        end if;
        return true;
    end if;
    delete from weir.delivery as d
    where d.lease_id = release.lease_id and d.consumer = release.consumer and d.due_at > clock_timestamp()
      and d.message_id = any (release.done);
    if found then
        return true;
    end if;
    update weir.delivery as d
    set state = 'ready', due_at = clock_timestamp(), attempt = d.attempt - 1, lease_id = null, consumer = null
    where d.lease_id = release.lease_id and d.consumer = release.consumer and d.due_at > clock_timestamp();
    return found;
end
$$;
