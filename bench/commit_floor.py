"""Programs that do nothing but the commits of a workload: no gateway can be faster, so they explain a missed target.

Each program appends by `LogStore`, which the gateway's appender uses too, to the Postgres and the log directory of a
gateway that has no clients. There are no sockets, no frames, no checks of records and no followers.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import os
import selectors
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager

from bench import librdkafka
from bench.servers import cpu_s
from protocol.records import Record, build_batch
from storage.embedded import EmbeddedPostgres
from storage.log import LogStore
from storage.pool import Database
from storage.segments import SegmentDirectory
from storage.types import Appended, NewBatch, PartitionKey
from tests.gateway_process import GatewayProcess

PARTITIONS = 6
RECORD_BYTES = 1024
SMALL_RECORD_BYTES = 100
RECORDS_PER_BATCH = 15
"""Records of 1 KiB in a batch of 16 KiB."""
IN_FLIGHT = 5
"""Batches of an idempotent producer that may be unacknowledged."""
PACE = 1000
WARM_UP_S = 2.0
COMMITTERS = 2
"""The default of `--committers`."""
MEBIBYTE = 1024 * 1024
_TOPIC = "commits-alone"
_PRODUCER = 1

Figures = dict[str, float]
Floor = Callable[[GatewayProcess, float, float], Coroutine[None, None, Figures]]


class Log:
    """The partitions of a fresh topic, and batches for them."""

    def __init__(self, store: LogStore, keys: Sequence[PartitionKey]) -> None:
        self._store, self._keys = store, keys
        self._next = itertools.cycle(range(len(keys)))
        self._sequences = [0] * len(keys)
        self._templates: dict[tuple[int, int], bytes] = {}

    def batch(self, records: int, record_bytes: int, *, idempotent: bool = False) -> NewBatch:
        """Return a batch for the next partition in turn. `idempotent` batches all belong to one producer."""
        now_ms = time.time_ns() // 1_000_000
        template = self._templates.get((records, record_bytes))
        if template is None:
            made = [Record(offset, now_ms, None, os.urandom(record_bytes)) for offset in range(records)]
            template = self._templates[records, record_bytes] = build_batch(made)
        partition = next(self._next)
        head = (_PRODUCER, 0, self._sequences[partition]) if idempotent else (-1, -1, -1)
        self._sequences[partition] += records
        return NewBatch(self._keys[partition], bytearray(template), records, now_ms, *head)

    def divided(self, parts: int) -> list[Log]:
        """Return one log for each of several committers. They share the partitions of the topic. If another commit
        holds a partition, it is refused as busy.
        """
        return [Log(self._store, self._keys[part::parts]) for part in range(parts)]

    async def commit(self, batches: Sequence[NewBatch]) -> None:
        """Append the batches in one transaction. Raise RuntimeError if one is refused."""
        for outcome in await self._store.append(batches, wait=False):
            if not isinstance(outcome, Appended) or outcome.duplicate:
                raise RuntimeError(f"a batch was not appended: {outcome}")


@asynccontextmanager
async def _opened(gateway: GatewayProcess, partitions: int) -> AsyncIterator[Log]:
    await asyncio.to_thread(librdkafka.create_topic, gateway.bootstrap, _TOPIC, partitions)
    url = EmbeddedPostgres(gateway.data_dir).running_url()
    if url is None:
        raise RuntimeError(f"no Postgres runs in {gateway.data_dir}")
    database = await Database.open(url)
    try:
        directory = SegmentDirectory(gateway.data_dir / "log")
        store = LogStore(database, directory)
        try:
            rows = await database.cold.fetch(
                "select partition_key from partition join topic using (topic_id) where name = $1 order by 1", _TOPIC
            )
            yield Log(store, [PartitionKey(row["partition_key"]) for row in rows])
        finally:
            await store.close()
            directory.close()
    finally:
        await database.close()


async def one_at_a_time(gateway: GatewayProcess, seconds: float, warm_up_s: float) -> Figures:
    """Commit one record of 100 bytes after the other."""

    async def commit_for(seconds: float) -> list[float]:
        times_ms: list[float] = []
        ends_s = time.perf_counter() + seconds
        while (started_s := time.perf_counter()) < ends_s:
            await log.commit([log.batch(1, SMALL_RECORD_BYTES)])
            times_ms.append((time.perf_counter() - started_s) * 1000)
        return times_ms

    async with _opened(gateway, 1) as log:
        await commit_for(warm_up_s)
        return _latency(await commit_for(seconds))


async def paced(gateway: GatewayProcess, seconds: float, warm_up_s: float) -> Figures:
    """Commit a thousand records of 100 bytes per second with two committers that share the partitions."""

    async def commit_for(seconds: float) -> list[float]:
        began_s = time.perf_counter()
        every_s = [began_s + number / PACE for number in range(int(seconds * PACE))]
        shares = [every_s[number::COMMITTERS] for number in range(COMMITTERS)]
        waited_ms = await asyncio.gather(*(_commit_when_due(*each) for each in zip(logs, shares, strict=True)))
        return [each for share in waited_ms for each in share]

    async with _opened(gateway, PARTITIONS) as log:
        logs = log.divided(COMMITTERS)
        await commit_for(warm_up_s)
        spent_s = _cpu_s(gateway)
        waited_ms = await commit_for(seconds)
        spent_s = _cpu_s(gateway) - spent_s
    return {"server CPU ms/record": spent_s * 1000 / len(waited_ms), **_latency(waited_ms)}


async def _commit_when_due(log: Log, dues_s: Sequence[float]) -> list[float]:
    """Commit one record at each of these moments. If a commit is still running then, commit all records that are due as
    soon as it ends. Return how many milliseconds each record waited for the end of its commit."""
    waited_ms: list[float] = []
    while len(waited_ms) < len(dues_s):
        now_s = time.perf_counter()
        due = bisect.bisect_right(dues_s, now_s) - len(waited_ms)
        if not due:
            await asyncio.sleep(dues_s[len(waited_ms)] - now_s)
            continue
        await log.commit([log.batch(1, SMALL_RECORD_BYTES) for _ in range(due)])
        ended_s = time.perf_counter()
        waited_ms += [(ended_s - due_s) * 1000 for due_s in dues_s[len(waited_ms) : len(waited_ms) + due]]
    return waited_ms


async def five_in_flight(gateway: GatewayProcess, seconds: float, warm_up_s: float) -> Figures:
    """Commit five idempotent batches of 16 KiB at a time, over six partitions."""

    async def commit_for(seconds: float) -> tuple[int, float]:
        records = 0
        began_s = time.perf_counter()
        while time.perf_counter() < began_s + seconds:
            batches = [log.batch(RECORDS_PER_BATCH, RECORD_BYTES, idempotent=True) for _ in range(IN_FLIGHT)]
            await log.commit(batches)
            records += IN_FLIGHT * RECORDS_PER_BATCH
        return records, time.perf_counter() - began_s

    async with _opened(gateway, PARTITIONS) as log:
        await commit_for(warm_up_s)
        spent_s = _cpu_s(gateway)
        records, took_s = await commit_for(seconds)
        spent_s = _cpu_s(gateway) - spent_s
    mebibytes = records * RECORD_BYTES / MEBIBYTE
    return {"MiB/s": mebibytes / took_s, "server CPU ms/MiB": spent_s * 1000 / mebibytes}


def _cpu_s(gateway: GatewayProcess) -> float:
    """Return the CPU seconds of this program and of Postgres. The gateway is idle, so its CPU is not counted."""
    return time.process_time() + cpu_s(gateway)


def _latency(times_ms: Sequence[float]) -> Figures:
    return {"p50 ms": statistics.median(times_ms), "p99 ms": statistics.quantiles(times_ms, n=100)[98]}


FLOORS: Mapping[str, Floor] = {
    "one-in-flight": one_at_a_time,
    "end-to-end": one_at_a_time,
    "paced": paced,
    "produce-idempotent": five_in_flight,
    "produce-java": five_in_flight,
    "produce-kafka-python": five_in_flight,
}
"""Programs by workload. Two clients share a program if their requests make the same commits."""


def measure(name: str, gateway: GatewayProcess, seconds: float, warm_up_s: float = WARM_UP_S) -> Figures:
    """Run the program of a workload against a started gateway that has no clients."""
    # Only `select` can wait for parts of a millisecond. With another selector the timer would delay each paced record.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(FLOORS[name](gateway, seconds, warm_up_s))
