-- name: history_witness
-- Identity of this server and its files, how far its write-ahead log is on disk, and which server process answers, since
-- when. The first two are null on a standby. The timeline changes with every promotion, the ids of database and table with every
-- restored dump.
select
    case when not pg_is_in_recovery() then concat_ws(
        '/',
        (select system_identifier from pg_control_system()),
        left(pg_walfile_name(pg_current_wal_flush_lsn()), 8),
        (select oid from pg_database where datname = current_database()),
        to_regclass('sluice.cluster')::oid
    ) end as identity,
    case when not pg_is_in_recovery() then (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint end as flushed_lsn,
    pg_backend_pid() as process_id,
    (select a.backend_start from pg_stat_activity a where a.pid = pg_backend_pid()) as started_at;

-- name: history_is_kept
-- Return whether the database already has Sluice's tables.
select to_regclass('sluice.cluster') is not null;

-- name: present_history
-- The number of the history that the database is in, the catalog's revision, and whether the database has the
-- transactions $1, which were committed. In
-- another history at least one of them does not exist yet, or was lost. A transaction too old for Postgres to know
-- counts as present.
select
    history,
    revision as catalog_revision,
    not exists (
        select from unnest($1::bigint[]) as acknowledged (transaction_id)
        where case
            when transaction_id::text::xid8 >= pg_snapshot_xmax(pg_current_snapshot()) then true
            else pg_xact_status(transaction_id::text::xid8) <> 'committed'
        end
    ) as has_all
from cluster;

-- name: adopt_history
-- Return the history that the database is in. Begin another one if the database lost commits.
select adopt_history($1, $2, $3);

-- name: partition_epochs
-- Offsets at which the leader epochs of partitions began, except each partition's first epoch.
select partition_key, leader_epoch, start_offset
from partition_epoch
where partition_key = any ($1::bigint[])
order by partition_key, leader_epoch;
