-- What a client has to know of a topic, and whether its role may COPY into the log: messages, and what else they can have.
select id, format,
    has_column_privilege(log, 'payload', 'insert') and has_column_privilege(log, 'key', 'insert')
        and has_column_privilege(log, 'headers', 'insert') and has_sequence_privilege(log || '_id', 'usage'),
    has_column_privilege(log, 'deliver_at', 'insert') and has_column_privilege(log, 'priority', 'insert')
        and has_column_privilege(log, 'timeout', 'insert')
from weir.topic_info($1::text)
