-- The ledger: the business data that producers write in the transaction that produces. Fails when it exists.
create table demo_ledger (
    entry text primary key,
    producer int not null,
    tx int not null,
    account text not null,
    cents bigint not null,
    message_id bigint not null,
    booked_at timestamptz not null default clock_timestamp()
)
