-- What a client has to know of the server.
select current_setting('default_transaction_isolation') as isolation, pg_is_in_recovery() as standby,
    current_setting('server_version_num')::int as version
