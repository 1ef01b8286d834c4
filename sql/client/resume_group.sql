-- Resumes a group.
select weir.resume_group($1::text, $2::text)
