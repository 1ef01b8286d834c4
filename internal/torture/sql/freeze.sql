-- Lets each commit wait for a standby that never answers.
alter system set synchronous_standby_names = 'nobody'
