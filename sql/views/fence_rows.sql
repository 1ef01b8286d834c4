-- weir.fence_rows: what the fence says at this moment, a row for each row of weir.fence.
--
-- bound    nothing at or below it can still appear, for statements whose snapshot is at least as new as this one's
-- pending  the head that waits for its proof, null where none does
-- looked   the pair that waits is to be proven by its holders
-- overdue  the pair has waited for a while and is not looked: something holds back xmin, and only a look tells whether it is a
--          producer of this topic
-- reached  the highest id that the fence knows to have been given out: the sequence cannot stand below it, unless the pair
--          comes from another cluster and its messages do not
--
-- The settled head of a topic is max(bound). This view is the only place that says when a pair is proven:
--
--   by xid   Every owner of an id <= head had its xid before the head was read (the id default takes the xid first), and
--            the observer took its own xid after that: each of them is below xid. When the oldest running transaction of
--            this snapshot is not below xid, all of them have finished, and this snapshot sees what they wrote. (The
--            latest completed xid + 1, pg_snapshot_xmax, says nothing of the kind: a lower xid may still be running.)
--   by lock  The holders are the producers of this topic that were seen at work after the head was read. When none is
--            running in this snapshot, every id <= head is decided. They are named by their xid, which outlives PREPARE
--            TRANSACTION. Nothing counts that was seen by a server that has since been restarted, or in another database
--            of this one, whose producers a restored dump would wait for: boot has both.
--
-- A pair whose xid has not been given out yet comes from another cluster (a restored dump, a promoted replica): it is
-- neither proven nor waited for. Nor is a pair waited for that nothing here can prove.
create or replace view weir.fence_rows as
select
    f.topic_id,
    f.slot,
    f.observed_at,
    case when f.proven then greatest(f.head, f.settled) else f.settled end as bound,
    case
        when not f.proven and not f.foreign_xid and (f.has_xid or f.seen_here) and f.head > f.settled then f.head
    end as pending,
    not f.proven and f.seen_here as looked,
    not f.proven and not f.seen_here and clock_timestamp() - f.observed_at > interval '100 ms' as overdue,
    greatest(f.head, f.settled) as reached
from (
    select
        p.topic_id, p.slot, p.observed_at, p.settled, p.head,
        p.xid is not null as has_xid,
        p.holders is not null and p.boot = pg_postmaster_start_time() + hashtext(current_database()) * interval '1 us' as seen_here,
        case
            when p.xid <= pg_snapshot_xmin(pg_current_snapshot()) then true
            when p.holders is not null and p.boot = pg_postmaster_start_time() + hashtext(current_database()) * interval '1 us'
            then weir.finished(p.holders)
            else false
        end as proven,
        case
            when p.xid >= pg_snapshot_xmax(pg_current_snapshot()) then p.xid is distinct from pg_current_xact_id_if_assigned()
            else false
        end as foreign_xid
    from weir.fence as p
) as f;
