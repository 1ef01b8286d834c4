-- Ends a session.
select pg_terminate_backend($1)
