"""Whether retention keeps up: how large the log is while a client produces at full speed under `retention.bytes`.

The size of the index follows retention alone; files go later, when nothing in them is alive and nobody can still be
about to read them (`storage/roller.py`). So there are two bounds: what retention.bytes allows with what is produced
between two looks at it, and what is produced while a dead file waits for its removal.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from bench import librdkafka
from gateway.operate.maintenance import SWEEP_INTERVAL_MS
from storage.embedded import EmbeddedPostgres
from storage.roller import GRACE_MS
from storage.segments import SEGMENT_BYTES
from tests.gateway_process import GatewayProcess

PARTITIONS = 4
RETENTION_BYTES = 64_000_000
CHECK_INTERVAL_MS = 1_000
SECONDS = float(os.environ.get("SLUICE_BENCH_RETENTION_SECONDS", "180"))
"""Ten minutes show that it holds; less than twice the grace of a file shows nothing of the disk."""

OPEN_SEGMENTS = 16
"""Files that are being written, or of which a part is alive."""

SETTINGS = {"log.retention.check.interval.ms": str(CHECK_INTERVAL_MS)}

_SIZES = """
select (select sum(size_bytes)::bigint from sluice.partition) as log_bytes,
       pg_database_size(current_database()) as database_bytes
"""


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    log_bytes: int
    """What the index says is there."""
    disk_bytes: int
    """What the files of the log take."""
    database_bytes: int


@dataclass(frozen=True, slots=True)
class Figures:
    produced: librdkafka.Throughput
    deleted_bytes: int
    samples: Sequence[Sample]

    @property
    def bytes_per_second(self) -> float:
        return self.produced.records * self.produced.record_bytes / self.produced.seconds

    @property
    def log_bound_bytes(self) -> float:
        """Limits, and what comes in while a pass waits for its turn and works."""
        return PARTITIONS * RETENTION_BYTES + 3 * CHECK_INTERVAL_MS / 1000 * self.bytes_per_second

    @property
    def disk_bound_bytes(self) -> float:
        """Sealed and emptied a file waits for the grace to end and for two sweeps."""
        waits_s = (GRACE_MS + 2 * SWEEP_INTERVAL_MS) / 1000
        return self.log_bound_bytes + waits_s * self.bytes_per_second + OPEN_SEGMENTS * SEGMENT_BYTES

    def greatest(self, size: str) -> int:
        return max(int(getattr(sample, size)) for sample in self.samples)

    @property
    def bounded(self) -> bool:
        return (
            self.greatest("log_bytes") <= self.log_bound_bytes and self.greatest("disk_bytes") <= self.disk_bound_bytes
        )


def measure(gateway: GatewayProcess) -> Figures:
    """`gateway` runs with SETTINGS and its own Postgres."""
    configs = {"retention.bytes": str(RETENTION_BYTES)}
    librdkafka.create_topic(gateway.bootstrap, "retained", PARTITIONS, configs)
    done = threading.Event()
    samples: list[Sample] = []
    failures: list[BaseException] = []

    def watch() -> None:
        try:
            asyncio.run(_watch(gateway, samples, done))
        except BaseException as error:
            failures.append(error)

    watcher = threading.Thread(target=watch, name="sizes")
    watcher.start()
    try:
        produced = librdkafka.produce(gateway.bootstrap, "retained", seconds=SECONDS)
    finally:
        done.set()
        watcher.join()
    if failures:
        raise failures[0]
    return Figures(produced, _deleted_bytes(gateway), samples)


async def _watch(gateway: GatewayProcess, samples: list[Sample], done: threading.Event) -> None:
    url = EmbeddedPostgres(gateway.data_dir).running_url()
    assert url is not None
    connection = await asyncpg.connect(url)
    began = time.monotonic()
    try:
        while not done.is_set():
            row = await connection.fetchrow(_SIZES)
            assert row is not None
            disk_bytes = 0
            with os.scandir(gateway.data_dir / "log") as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        disk_bytes += entry.stat().st_blocks * 512
            samples.append(Sample(time.monotonic() - began, row["log_bytes"], disk_bytes, row["database_bytes"]))
            await asyncio.to_thread(done.wait, 0.5)
    finally:
        await connection.close()


def _deleted_bytes(gateway: GatewayProcess) -> int:
    deleted_bytes = 0
    for line in gateway.log_text().splitlines():
        if "retention removed batches" in line:
            deleted_bytes += int(json.loads(line)["deleted_bytes"])
    return deleted_bytes
