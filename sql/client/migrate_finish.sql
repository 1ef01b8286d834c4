-- Those of topics that are there already.
select weir.make_insert(t) from weir.topic as t where t.dropped_at is null;
-- Nothing is granted to PUBLIC. Functions are, by default, at their creation.
revoke all on all functions in schema weir from public;
revoke all on all tables in schema weir from public;
revoke all on all sequences in schema weir from public;
revoke all on schema weir from public;
