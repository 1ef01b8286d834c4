-- Books the entries of one transaction.
insert into demo_ledger (entry, producer, tx, account, cents, message_id)
select e.entry, $1, $2, e.account, e.cents, e.id
from unnest($3::text[], $4::text[], $5::bigint[], $6::bigint[]) as e (entry, account, cents, id)
