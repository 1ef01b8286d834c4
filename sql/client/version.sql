-- What is installed.
select version, compatible, functions from weir.version()
