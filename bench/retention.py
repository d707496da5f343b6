"""Check that retention keeps up: measure the size of the log under `retention.bytes` while a client produces at full
speed.

There are three bounds:
- The index may show what retention.bytes allows, and what is produced between two passes. The size of the index follows
  retention alone.
- The disk may also hold what is produced while a dead file waits for its removal. A file is removed when nothing in it
  is alive and no reader can still be about to read it (`storage/roller.py`).
- Postgres keeps index rows of live segments, and removed rows until vacuum takes them. Its write-ahead log is bounded
  by its settings and counted separately.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from bench import librdkafka
from gateway.operate.maintenance import SWEEP_INTERVAL_MS
from storage.embedded import EmbeddedPostgres
from storage.roller import GRACE_MS, KEPT_MS, REMOVAL_PATIENCE_S
from storage.segments import SEGMENT_BYTES
from tests.gateway_process import GatewayProcess

PARTITIONS = 4
RETENTION_BYTES = 64_000_000
CHECK_INTERVAL_MS = 1_000
SECONDS = float(os.environ.get("SLUICE_BENCH_RETENTION_SECONDS", "180"))
"""A run of ten minutes shows that retention keeps up. A run shorter than twice the grace period of a file shows nothing
about the disk.
"""

OPEN_SEGMENTS = 16
"""Number of files that are being written or that hold some live records."""

DATABASE_BOUND_BYTES = 200_000_000
"""Allowed size of the database after 50 GB were produced."""

SETTINGS = {"log.retention.check.interval.ms": str(CHECK_INTERVAL_MS)}

_SIZES = """
select (select sum(size_bytes)::bigint from sluice.partition_log) as log_bytes,
       pg_database_size(current_database()) as database_bytes,
       (select sum(size)::bigint from pg_ls_waldir()) as wal_bytes
"""
LEAST_FREE_BYTES = 4_000_000_000
"""The run ends if less space is free, because then retention does not keep up, and other programs need the disk."""
_CHUNKS = "select count(*) from sluice.chunk"


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    log_bytes: int
    """Bytes of the log according to the index."""
    disk_bytes: int
    """Bytes of the log's files."""
    database_bytes: int
    """Bytes according to `pg_database_size`: tables and indexes, without the write-ahead log."""
    wal_bytes: int


@dataclass(frozen=True, slots=True)
class Figures:
    produced: librdkafka.Throughput
    deleted_bytes: int
    samples: Sequence[Sample]
    """Samples in order. The last sample follows the last acknowledgement."""
    chunks: int
    """Rows of the index at the end."""

    @property
    def through_bytes(self) -> int:
        """Return the acknowledged bytes."""
        return self.produced.records * self.produced.record_bytes

    @property
    def bytes_per_second(self) -> float:
        return self.through_bytes / self.produced.seconds

    @property
    def log_bound_bytes(self) -> float:
        """Return the retention limits plus the records that arrive while a pass waits for its turn and works."""
        return PARTITIONS * RETENTION_BYTES + 3 * CHECK_INTERVAL_MS / 1000 * self.bytes_per_second

    @property
    def disk_bound_bytes(self) -> float:
        """Return the limit for the disk. A sealed file stays for its grace period, and until a sweep finds it empty.
        Then it waits for the first sweep after KEPT_MS, which takes some time to remove all such files.
        """
        waits_s = (GRACE_MS + SWEEP_INTERVAL_MS + max(KEPT_MS, SWEEP_INTERVAL_MS)) / 1000 + REMOVAL_PATIENCE_S
        return self.log_bound_bytes + waits_s * self.bytes_per_second + OPEN_SEGMENTS * SEGMENT_BYTES

    def greatest(self, size: str) -> int:
        return max(int(getattr(sample, size)) for sample in self.samples)

    @property
    def bounded(self) -> bool:
        return (
            self.greatest("log_bytes") <= self.log_bound_bytes and self.greatest("disk_bytes") <= self.disk_bound_bytes
        )

    @property
    def small(self) -> bool:
        """Return whether Postgres was within its limit at the end."""
        return self.samples[-1].database_bytes <= DATABASE_BOUND_BYTES


def measure(gateway: GatewayProcess) -> Figures:
    """Measure a gateway that runs with SETTINGS and its own Postgres."""
    configs = {"retention.bytes": str(RETENTION_BYTES)}
    librdkafka.create_topic(gateway.bootstrap, "retained", PARTITIONS, configs)
    done = threading.Event()
    samples: list[Sample] = []
    chunks: list[int] = []
    failures: list[BaseException] = []
    failed = threading.Event()

    def watch() -> None:
        try:
            chunks.append(asyncio.run(_watch(gateway, samples, done)))
        except BaseException as error:
            failures.append(error)
            failed.set()

    watcher = threading.Thread(target=watch, name="sizes")
    watcher.start()
    try:
        produced = librdkafka.produce(gateway.bootstrap, "retained", seconds=SECONDS, stop=failed)
    finally:
        done.set()
        watcher.join()
        if failures:
            raise failures[0]
    return Figures(produced, _deleted_bytes(gateway), samples, chunks[0])


async def _watch(gateway: GatewayProcess, samples: list[Sample], done: threading.Event) -> int:
    """Take a sample every half second, and one after `done`. Return the final number of rows of the index."""
    url = EmbeddedPostgres(gateway.data_dir).running_url()
    assert url is not None
    connection = await asyncpg.connect(url)
    began = time.monotonic()
    try:
        last = False
        while not last:
            last = done.is_set()
            row = await connection.fetchrow(_SIZES)
            assert row is not None
            disk_bytes = 0
            with os.scandir(gateway.data_dir / "log") as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        disk_bytes += entry.stat().st_blocks * 512
            if (free_bytes := shutil.disk_usage(gateway.data_dir).free) < LEAST_FREE_BYTES:
                raise RuntimeError(
                    f"the log's files have {disk_bytes:,} bytes and the disk has only {free_bytes:,} free"
                )
            samples.append(
                Sample(time.monotonic() - began, row["log_bytes"], disk_bytes, row["database_bytes"], row["wal_bytes"])
            )
            if not last:
                await asyncio.to_thread(done.wait, 0.5)
        return int(await connection.fetchval(_CHUNKS))
    finally:
        await connection.close()


def _deleted_bytes(gateway: GatewayProcess) -> int:
    deleted_bytes = 0
    for line in gateway.log_text().splitlines():
        if "retention removed batches" in line:
            deleted_bytes += int(json.loads(line)["deleted_bytes"])
    return deleted_bytes
