-- name: server_report
-- Version, clock and settings of the server. A reserved connection is not free for this role. max_wal_size is in bytes.
select
    current_setting('server_version_num')::int / 10000 as major_version,
    (extract(epoch from clock_timestamp()) * 1000)::bigint as clock_ms,
    current_setting('fsync')::bool as fsync,
    current_setting('full_page_writes')::bool as full_page_writes,
    pg_size_bytes(current_setting('max_wal_size')) as max_wal_bytes,
    current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
        - coalesce(current_setting('reserved_connections', true), '0')::int as usable_connections;
