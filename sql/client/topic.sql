-- What a client has to know of a topic, and whether its role may COPY into the log.
select id, format, has_column_privilege(log, 'payload', 'insert') and has_column_privilege(log, 'key', 'insert')
    and has_column_privilege(log, 'headers', 'insert')
from weir.topic_info($1::text)
