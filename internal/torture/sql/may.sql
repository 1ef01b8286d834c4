-- What kinds of faults need, the time, and whether what a torture would drop is another's.
select
    pg_get_userbyid(d.datdba) = current_user or r.rolsuper,
    current_setting('max_prepared_transactions')::int,
    (extract(epoch from clock_timestamp()) * 1000000)::bigint,
    coalesce(
        to_regnamespace('weir_torture') is not null
        and obj_description(to_regnamespace('weir_torture'), 'pg_namespace') is distinct from 'made by weir torture',
        false
    )
from pg_roles as r, pg_database as d
where r.rolname = current_user and d.datname = current_database()
