-- name: pin_session_settings
-- For the life of the connection, set the settings $1 to the values $2, if this Postgres has them, and let commits wait
-- for the disk.
select set_config(name, value, false)
from unnest($1::text[], $2::text[]) as pinned (name, value)
where current_setting(name, true) is not null
union all
select set_config('synchronous_commit', 'on', false) where current_setting('synchronous_commit') = 'off';

-- name: backend
-- Return the server process that answers.
select pg_backend_pid();

-- name: end_sessions
-- End the server processes $1, which started at $2, of this role in this database; return those that have not ended
-- after $3 milliseconds each. A process that ends by itself in the meantime may be returned, too.
select coalesce(array_agg(told.pid), '{}')
from (
    select a.pid, pg_terminate_backend(a.pid, $3) as ended
    from pg_stat_activity a
    where (a.pid, a.backend_start) in (select * from unnest($1::integer[], $2::timestamptz[]))
        and a.datname = current_database() and a.usename = current_user
        and a.application_name = current_setting('application_name')
    offset 0
) told
where not told.ended;
