-- Schema step 4: retention, compaction, maintenance.

drop view if exists weir.blockers;
drop view if exists weir.dead_letters;
drop view if exists weir.deliveries;
drop view if exists weir.leases;
drop view if exists weir.consumers;
drop view if exists weir.groups;
drop view if exists weir.topics;
drop function if exists weir.after_produce(weir.topic, bigint, bigint);
drop function if exists weir.drop_topic(text);
drop function if exists weir.drop_group(text, text);

alter table weir.topic
    -- how long messages are kept at least, and how many bytes of them; null for ever, and without limit
    add column retention_age interval constraint topic_retention_age check (retention_age > interval '0'),
    add column retention_bytes bigint constraint topic_retention_bytes check (retention_bytes > 0),
    -- retention also removes what a group has yet to finish
    add column drop_unread boolean not null default false,
    -- only the latest message of each key is kept
    add column compact boolean not null default false,
    -- how long a tombstone of a compacted topic is kept
    add column tombstone_ttl interval not null default '1 day',
    -- sealed segments when the log was analyzed last
    add column analyzed int not null default 0,
    -- the topic is being dropped: it has no name any more
    add column dropped_at timestamptz;

alter table weir.segment
    -- since when all of its ids are settled. What follows was taken then
    add column sealed_at timestamptz,
    add column messages bigint,
    add column bytes bigint,
    add column first_at timestamptz,
    add column last_at timestamptz,
    -- its messages are removed; the table is dropped at the next opportunity
    add column emptied_at timestamptz,
    -- of a compacted topic: the number of the last segment before it that was compared with it, how many messages it has lost
    -- since it was written anew
    add column compared int not null default 0,
    add column removed bigint not null default 0;

alter table weir.consumer_group
    -- messages that retention removed before the group had finished them
    add column missed bigint not null default 0,
    add column missed_at timestamptz;

-- What operators say of maintenance. Nothing is written here by maintenance itself: an idle install writes nothing.
create table weir.maintenance (
    only_row boolean primary key default true constraint maintenance_one_row check (only_row),
    suspended_at timestamptz
);
insert into weir.maintenance default values;
