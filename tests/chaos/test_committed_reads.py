"""Reads with read_committed, checked against a model of the log.

Random transactions run on a real Postgres. The node's tail (its records in memory) learns of their results late, out of
order or never. The tail must return what Postgres returns.

SLUICE_TRANSACTION_SEEDS=200 python -m pytest tests/chaos/test_committed_reads.py
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from gateway.log.tail import Tail
from protocol.buffer import Buffer
from protocol.records import iter_records, read_head
from storage import retention
from storage.log import Bounds, LogStore
from storage.pool import Database
from storage.retention import UNLIMITED, RetentionPolicy
from storage.roller import Roller
from storage.segments import SegmentDirectory
from storage.topics import TopicStore
from storage.transactions import AppendedMarker
from storage.types import (
    AbortedTransaction,
    Appended,
    NewBatch,
    NewTopic,
    PartitionKey,
    PartitionState,
    ReadRequest,
    ReadResult,
    StoredBatch,
    Topic,
)
from tests.storage.batches import EVERYTHING
from tests.storage.transactions import Producer, committed_records, plain_batch

SEEDS = int(os.environ.get("SLUICE_TRANSACTION_SEEDS", "12"))
STEPS = 100
PARTITIONS = 2
PRODUCERS = 3
TAIL_BYTES = (0, 800, 3_000, 20_000, 10**6)
RECENT = 40
"""Number of recent offsets from which the test reads the tail again and again."""
READ_BYTES = (1, 200, 600, 10**6)


class Told(Protocol):
    """A notification to a node. It must run on the node's event loop."""

    def __call__(self) -> None: ...


@dataclass
class ModelBatch:
    base_offset: int
    last_offset: int
    values: list[bytes]
    """Return the values of the records. A marker has no value."""
    transaction: ModelTransaction | None = None


@dataclass
class ModelTransaction:
    producer_id: int
    first_offset: int
    marker_offset: int | None = None
    committed: bool = False


@dataclass
class ModelLog:
    """The expected log of one partition."""

    batches: list[ModelBatch] = field(default_factory=list[ModelBatch])
    transactions: list[ModelTransaction] = field(default_factory=list[ModelTransaction])
    open: dict[int, ModelTransaction] = field(default_factory=dict[int, ModelTransaction])
    log_start: int = 0

    @property
    def end(self) -> int:
        return self.batches[-1].last_offset + 1 if self.batches else 0

    @property
    def stable(self) -> int:
        return max(min((each.first_offset for each in self.open.values()), default=self.end), self.log_start)

    def append(self, base_offset: int, values: list[bytes], producer_id: int | None) -> None:
        assert base_offset == self.end
        transaction = None
        if producer_id is not None:
            transaction = self.open.get(producer_id)
            if transaction is None:
                transaction = self.open[producer_id] = ModelTransaction(producer_id, base_offset)
                self.transactions.append(transaction)
        self.batches.append(ModelBatch(base_offset, base_offset + len(values) - 1, values, transaction))

    def mark(self, offset: int, producer_id: int, *, committed: bool) -> None:
        assert offset == self.end
        ended = self.open.pop(producer_id, None)
        if ended is not None:
            ended.marker_offset, ended.committed = offset, committed
        self.batches.append(ModelBatch(offset, offset, []))

    def committed_between(self, offset: int, end_offset: int) -> list[bytes]:
        """Return the values that a consumer receives from the batches between the one that contains `offset` and
        `end_offset`."""
        return [
            value
            for batch in self.batches
            if offset <= batch.last_offset and batch.last_offset < end_offset
            for value in batch.values
            if batch.transaction is None or batch.transaction.committed
        ]

    def aborted_between(self, offset: int, end_offset: int) -> list[AbortedTransaction]:
        return [
            AbortedTransaction(each.producer_id, each.first_offset)
            for each in self.transactions
            if each.marker_offset is not None
            and not each.committed
            and each.marker_offset >= offset
            and each.first_offset < end_offset
        ]


class Run:
    """Random calls that follow from a seed. `tell` keeps events until the node's event loop would process them."""

    def __init__(self, seed: int, database: Database, log: LogStore, roller: Roller, topic: Topic) -> None:
        self.chance = random.Random(seed)
        self.database, self.log, self.roller = database, log, roller
        self.keys = [part.partition_key for part in topic.partitions]
        self.models = {key: ModelLog() for key in self.keys}
        self.tail = Tail(self.chance.choice(TAIL_BYTES))
        self.producers = [Producer(database, log, 1_000 * seed + number) for number in range(PRODUCERS)]
        self.under_way: dict[int, set[PartitionKey]] = {}
        self.untold: list[Told] = []
        self.elsewhere = self.chance.choice((0.0, 0.2, 0.5))
        """Share of the transactions that one node begins and another node ends."""
        self.disorder = self.chance.choice((0.0, 0.02, 0.2, 0.5))
        self.settled = False
        self.count = 0
        self.served = 0

    async def step(self) -> None:
        await self.chance.choices(
            [
                self.write_plain,
                self.write,
                self.end,
                self.observe,
                self.delete_records,
                self.move,
                self.lose,
                self.read,
            ],
            [6, 14, 8, 6, 1, 1, 6 * self.disorder, 6],
        )[0]()
        while self.untold and self.chance.random() < 0.8:
            self.untold.pop(0 if self.chance.random() >= self.disorder else -1)()
        self.look()

    async def settle(self) -> None:
        """Process all pending events, and let the node read the ends of its logs."""
        while self.untold:
            self.untold.pop(0)()
        states = await self.log.states(self.keys)
        for key in self.keys:
            self.tail.observe(key, states[key], 0.0)
        self.settled = True

    # --- other clients and nodes --------------------------------------------------------------------------------------

    async def write_plain(self) -> None:
        key = self.chance.choice(self.keys)
        await self._append([plain_batch(key, *((None, value) for value in self._values()))])

    async def write(self) -> None:
        producer = self.chance.choice(self.producers)
        keys = self.under_way.setdefault(producer.producer_id, set())
        batches: list[NewBatch] = []
        for _ in range(self.chance.choice((1, 1, 2, 3))):
            key = self.chance.choice(self.keys)
            if key not in keys or self.chance.random() < 0.2:
                await producer.take_in(key)
                keys.add(key)
            batches.append(producer.batch(key, *((None, value) for value in self._values())))
        if self.chance.random() < 0.2:
            batches.append(plain_batch(self.chance.choice(self.keys), *((None, value) for value in self._values())))
        await self._append(batches)

    async def end(self) -> None:
        if not self.under_way:
            return
        producer = self.chance.choice([each for each in self.producers if each.producer_id in self.under_way])
        keys = self.under_way.pop(producer.producer_id)
        committed = self.chance.random() < 0.5
        ended = await producer.end(committed=committed)
        assert {marker.partition_key for marker in ended.markers} == keys
        elsewhere = self.chance.random() < self.elsewhere
        for marker in ended.markers:
            model = self.models[marker.partition_key]
            model.mark(marker.base_offset, producer.producer_id, committed=committed)
            if not elsewhere:
                self._tell(partial(self._marked, producer.producer_id, marker, committed=committed))

    async def delete_records(self) -> None:
        key = self.chance.choice(self.keys)
        model = self.models[key]
        before = self.chance.randint(model.log_start, model.end)
        if self.chance.random() < 0.7:
            before = min(before, model.log_start + 5)
        assert await self.log.delete_records(key, before) == before
        model.log_start = before
        await retention.apply(self.database, [RetentionPolicy(key, retention_ms=UNLIMITED)])
        self._tell(partial(self.tail.log_start_moved, key, before))

    async def move(self) -> None:
        await self.roller.roll(**EVERYTHING)

    async def observe(self) -> None:
        for key, state in (await self.log.states(self.keys)).items():
            model = self.models[key]
            assert (state.log_start_offset, state.high_watermark, state.last_stable_offset) == (
                model.log_start,
                model.end,
                model.stable,
            )
            self._tell(partial(self.tail.observe, key, state, 0.0))

    async def lose(self) -> None:
        """Lose an event, as if another node had caused it or the answer had never arrived."""
        if self.untold:
            self.untold.pop(self.chance.randrange(len(self.untold)))

    async def _append(self, batches: Sequence[NewBatch]) -> None:
        outcomes = await self.log.append(batches, wait=self.chance.random() < 0.5)
        for batch, outcome in zip(batches, outcomes, strict=True):
            assert isinstance(outcome, Appended), outcome
            assert not outcome.duplicate
            values = [record.value or b"" for record in iter_records(batch.records)]
            producer_id = batch.producer_id if batch.is_transactional else None
            self.models[batch.partition_key].append(outcome.base_offset, values, producer_id)
        for batch, outcome in zip(batches, outcomes, strict=True):
            assert isinstance(outcome, Appended)
            self._tell(partial(self._appended, batch, outcome))

    # --- what the node learns -----------------------------------------------------------------------------------------

    def _tell(self, told: Told) -> None:
        if self.untold or self.chance.random() < 3 * self.disorder:
            self.untold.append(told)
        else:
            told()

    def _appended(self, batch: NewBatch, outcome: Appended) -> None:
        self.tail.record_append(
            batch.partition_key,
            base_offset=outcome.base_offset,
            last_offset=outcome.base_offset + batch.record_count - 1,
            records=batch.records,
            log_start_offset=outcome.log_start_offset,
            leader_epoch=outcome.leader_epoch,
            now_s=0.0,
            last_stable_offset=outcome.open_since_offset,
        )

    def _marked(self, producer_id: int, marker: AppendedMarker, *, committed: bool) -> None:
        aborted = None
        if not committed and marker.first_offset is not None:
            aborted = AbortedTransaction(producer_id, marker.first_offset)
        self.tail.record_append(
            marker.partition_key,
            base_offset=marker.base_offset,
            last_offset=marker.base_offset,
            records=marker.records,
            log_start_offset=marker.log_start_offset,
            leader_epoch=marker.leader_epoch,
            now_s=0.0,
            last_stable_offset=marker.last_stable_offset,
            aborted=aborted,
        )

    # --- answers to readers -------------------------------------------------------------------------------------------

    async def read(self) -> None:
        """Read from one offset, both from the tail and from Postgres."""
        key = self.chance.choice(self.keys)
        model = self.models[key]
        first = model.log_start if self.chance.random() < 0.3 else max(model.log_start, model.end - RECENT)
        offset = self.chance.randint(first, model.end)
        max_bytes = self.chance.choice(READ_BYTES)
        cold = await self._read_cold(key, offset, max_bytes)
        # Postgres cuts the result at the border of a chunk, so either of the two reads may end first.
        for batch, stored in zip(self.read_warm(key, offset, max_bytes) or (), cold, strict=False):
            assert bytes(batch) == bytes(stored.records)

    def look(self) -> None:
        """Read from each of the recent offsets in the tail."""
        for key, model in self.models.items():
            for offset in range(max(model.log_start, model.end - RECENT), model.end + 1):
                self.read_warm(key, offset, self.chance.choice(READ_BYTES))

    def read_warm(self, key: PartitionKey, offset: int, max_bytes: int) -> Sequence[Buffer] | None:
        """Read from the tail. The tail may have fewer records than Postgres, but no others."""
        model = self.models[key]
        found = self.tail.read(key, offset, max_bytes, at_least_one=True, now_s=0.0, committed=True)
        if found is None or found.known.log_start_offset > offset:
            return None
        assert found.known.last_stable_offset <= model.stable, "further than is stable"
        batches = list(found.batches)
        if self.settled:
            assert found.known.last_stable_offset == model.stable
            assert batches or offset >= model.stable, "stuck below what is stable"
        if batches:
            self.served += 1
            end_offset = read_head(batches[-1]).last_offset + 1
            assert end_offset <= model.stable
            assert list(found.aborted) == model.aborted_between(offset, end_offset)
            self._check(model, offset, end_offset, batches, found.aborted)
        return batches

    async def _read_cold(self, key: PartitionKey, offset: int, max_bytes: int) -> Sequence[StoredBatch]:
        model = self.models[key]
        (result,) = await self.log.read([ReadRequest(key, offset, max_bytes, committed=True)], max_bytes=max_bytes)
        assert isinstance(result, ReadResult)
        state: PartitionState = result.state
        assert (state.high_watermark, state.last_stable_offset) == (model.end, model.stable)
        assert bool(result.batches) == (offset < model.stable)
        if not result.batches:
            return ()
        end_offset = result.batches[-1].last_offset + 1
        assert end_offset <= model.stable
        assert list(result.aborted) == model.aborted_between(offset, end_offset)
        self._check(model, offset, end_offset, [batch.records for batch in result.batches], result.aborted)
        return result.batches

    def _check(
        self,
        model: ModelLog,
        offset: int,
        end_offset: int,
        batches: Sequence[Buffer],
        aborted: Sequence[AbortedTransaction],
    ) -> None:
        """Assert that a consumer receives the committed records of these batches, and no others."""
        stored = [StoredBatch(*_span(batch), 0, bytes(batch)) for batch in batches]
        taken = [record.value for record in committed_records(stored, aborted)]
        assert taken == model.committed_between(offset, end_offset)

    def _values(self) -> list[bytes]:
        self.count += 1
        return [b"%d-%d" % (self.count, number) for number in range(self.chance.choice((1, 1, 2, 5)))]


def _span(batch: Buffer) -> tuple[int, int]:
    head = read_head(batch)
    return head.base_offset, head.last_offset


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(database_url, hot_connections=2, cold_connections=2)
    yield opened
    await opened.close()


async def test_the_tail_returns_the_same_committed_records_as_postgres(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = 0
    for seed in range(1, SEEDS + 1):
        (topic,) = await TopicStore(database).create([NewTopic(f"t{seed}", PARTITIONS, {})])
        assert isinstance(topic, Topic)
        directory = SegmentDirectory(tmp_path, segment_bytes=256 * 1024)
        log = LogStore(database, directory, bounds=Bounds(aborted=random.Random(seed).choice((1, 3, 1_000))))
        roller = Roller(database, log, directory)
        run = Run(seed, database, log, roller, topic)
        monkeypatch.setattr("gateway.log.tail.MAX_ABORTED_LOOKED_AT", run.chance.choice((1, 3, 1_000)))
        try:
            for _ in range(STEPS):
                await run.step()
            await run.settle()
            run.look()
        except AssertionError as error:
            error.add_note(f"seed {seed}, tail of {run.tail.size_bytes} bytes")
            raise
        served += run.served
        await roller.close()
        await log.close()
    assert served > SEEDS * 100, "the tail has hardly been asked"
