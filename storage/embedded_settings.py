"""Settings and configuration file of the embedded Postgres."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from storage.embedded_socket import PORT

FIRST_WITH_IO_WORKERS = 18

SERVER_SETTINGS: Mapping[str, str] = {
    # The server is reachable through a private Unix socket only.
    "listen_addresses": "",
    "port": str(PORT),
    "unix_socket_permissions": "0700",
    "max_connections": "100",
    # Every acknowledgement needs a synced commit.
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    # One server, no replicas, but a copy may be taken while it runs: pg_basebackup takes two connections and, while it
    # works, a slot. Record batches arrive compressed.
    "wal_level": "replica",
    "max_wal_senders": "2",
    "max_replication_slots": "1",
    "max_logical_replication_workers": "0",
    "wal_compression": "off",
    # We start the server again ourselves. With this setting on, Postgres recovers under the old postmaster after a
    # crash of one of its processes. If that recovery finds no room on the disk, the postmaster stays up for ever and
    # accepts no connection.
    "restart_after_crash": "off",
    # A group commit carries up to 8 MiB.
    "wal_buffers": "16MB",
    # With 1 GB the server sustained more, at half the p99, than with 8 GB, and the bound limits disk space and crash
    # recovery to seconds. Recycled segments are written faster than new ones, so half of the bound is kept.
    "max_wal_size": "1GB",
    "min_wal_size": "512MB",
    "checkpoint_timeout": "15min",
    # Memory for indexes and partition rows. Batches are written once and then read from the tail or the page cache.
    "shared_buffers": "256MB",
    "huge_pages": "try",
    # Short keyed statements on local storage: no parallel plans, no compilation, cheap random pages.
    "max_parallel_workers_per_gather": "0",
    "max_worker_processes": "4",
    "io_workers": "2",
    "jit": "off",
    "random_page_cost": "1.1",
    # Partition, group and offset rows are updated constantly: clean little and often.
    "autovacuum_max_workers": "2",
    "autovacuum_naptime": "15s",
    "autovacuum_vacuum_scale_factor": "0.05",
    "autovacuum_vacuum_cost_limit": "1000",
    "log_min_messages": "warning",
    "log_line_prefix": "%m [%p] ",
    "log_timezone": "UTC",
    "timezone": "UTC",
    "lc_messages": "C",
}


def configuration(settings: Mapping[str, str], connections: int, socket_directory: Path, major: int) -> str:
    """Return the text of postgresql.conf for a server of the major version. It allows at least `connections`
    connections.
    """
    most = max(connections, int(settings["max_connections"]))
    settings = {**settings, "max_connections": str(most), "unix_socket_directories": str(socket_directory)}
    if major < FIRST_WITH_IO_WORKERS:
        del settings["io_workers"]
    return "".join(f"{name} = {_quoted(value)}\n" for name, value in settings.items())


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"
