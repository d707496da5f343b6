-- name: pin_session_settings
-- For the connection's life: the settings $1 with the values $2, if this Postgres has them; a commit is on disk.
select set_config(name, value, false)
from unnest($1::text[], $2::text[]) as pinned (name, value)
where current_setting(name, true) is not null
union all
select set_config('synchronous_commit', 'on', false) where current_setting('synchronous_commit') = 'off';

-- name: backend
-- Which server process answers.
select pg_backend_pid();
