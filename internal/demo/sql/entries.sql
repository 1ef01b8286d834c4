-- Everything that was committed: the log and the ledger, side by side. A row that lacks one side, or whose sides differ, is
-- half a transaction.
select l.id, l.payload ->> 'entry', l.key, b.message_id, b.entry, b.account
from demo_log as l
full join demo_ledger as b on b.message_id = l.id
order by coalesce(l.id, b.message_id)
