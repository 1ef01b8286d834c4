-- Has the server read its settings anew.
select pg_reload_conf()
