-- name: server_properties
-- What the database must be: version as in server_version_num, encoding.
select current_setting('server_version_num')::integer as version, getdatabaseencoding()::text as encoding;

-- name: migration_limits
-- A migration may take longer than a request, but waits only so long for locks.
select set_config('statement_timeout', '0', true), set_config('lock_timeout', '20000', true);

-- name: lock_migrations
-- One node at a time; released at the end of the transaction. The key is an arbitrary constant.
select pg_advisory_xact_lock(5364219801234501);

-- name: create_schema
-- Everything lives in its own schema, so that Sluice can share a database.
create schema if not exists sluice;

-- name: create_migration_table
-- The table of the migrations that have been applied.
create table if not exists sluice.schema_migration (
    version     integer primary key,
    file_name   text not null,
    applied_at  timestamptz not null default now()
);

-- name: applied_migrations
-- The files that made the schema, in order.
select version, file_name from sluice.schema_migration order by version;

-- name: record_migration
-- Note an applied file, in the transaction that applied it.
insert into sluice.schema_migration (version, file_name) values ($1, $2);

-- name: schema_exists
-- Return whether the schema $1 exists.
select exists (select from pg_namespace where nspname = $1);

-- name: count_functions
-- Return how many functions the schema $1 has.
select count(*) from pg_proc p join pg_namespace n on n.oid = p.pronamespace where n.nspname = $1;

-- name: use_search_path
-- Set the search path until the end of the transaction.
select set_config('search_path', $1, true);
