-- Renames a topic.
select weir.rename_topic($1::text, $2::text)
