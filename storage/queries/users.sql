-- name: scram_credential
-- One credential, by user and mechanism.
select iterations, salt, stored_key, server_key from scram_credential where user_name = $1 and mechanism = $2;

-- name: scram_secret
-- The secret from which the credentials of unknown users are derived.
select scram_secret from cluster;

-- name: scram_credentials_of
-- Mechanisms and iterations of these users, without keys; of all users if $1 is null.
select user_name, mechanism, iterations
from scram_credential
where $1::text[] is null or user_name = any($1::text[])
order by user_name, mechanism;

-- name: set_scram_credentials
-- Each pair of user and mechanism is given once; a new credential replaces an existing one.
insert into scram_credential (user_name, mechanism, iterations, salt, stored_key, server_key)
select * from unnest($1::text[], $2::smallint[], $3::integer[], $4::bytea[], $5::bytea[], $6::bytea[])
on conflict (user_name, mechanism) do update
set iterations = excluded.iterations, salt = excluded.salt,
    stored_key = excluded.stored_key, server_key = excluded.server_key;

-- name: delete_scram_credentials
-- Return the deleted credentials.
delete from scram_credential c
using unnest($1::text[], $2::smallint[]) as d (user_name, mechanism)
where c.user_name = d.user_name and c.mechanism = d.mechanism
returning c.user_name, c.mechanism;

-- name: count_scram_users
-- Users that have a credential.
select count(distinct user_name) from scram_credential;
