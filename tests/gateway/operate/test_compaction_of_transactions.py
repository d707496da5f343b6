"""Compaction of transactional records, on a real Postgres: a reader with read_committed sees no difference."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import asyncpg
import pytest

from gateway.log.compactor import MAX_KEYS
from protocol.records import ControlType, control_type_of, read_head
from storage import retention
from storage.chunks import Chunk
from storage.compaction import CompactionRun, CompactionStore, DirtyRange
from storage.mover import Mover
from storage.types import PartitionKey
from tests.gateway.data_plane import DataPlane, data_plane
from tests.gateway.operate.compaction import compact
from tests.storage.batches import append, read
from tests.storage.transactions import Pair, Producer, plain_batch, read_committed

EAGER = {"cleanup.policy": "compact", "segment.ms": "1", "min.cleanable.dirty.ratio": "0", "delete.retention.ms": "0"}


@pytest.fixture
async def node(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url) as node:
        yield node


@pytest.fixture
async def key(node: DataPlane) -> PartitionKey:
    return (await node.create_topic("t", configs=EAGER)).partitions[0].partition_key


async def plain(node: DataPlane, key: PartitionKey, *pairs: Pair) -> int:
    return (await append(node.log, plain_batch(key, *pairs)))[0]


async def bases(node: DataPlane, key: PartitionKey) -> list[int]:
    return [batch.base_offset for batch in (await read(node.log, key)).batches]


async def test_a_changelog_that_transactions_write_stays_small(node: DataPlane, key: PartitionKey) -> None:
    """Kafka Streams writes a changelog like this with exactly_once: a marker for each commit, and the same keys
    repeatedly.
    """
    producer = Producer(node.database, node.log, 1)
    for version in range(20):
        await producer.append(key, (b"a", b"%d" % version), (b"b", b"%d" % version))
        await producer.end(committed=True)
        if version % 5 == 4:
            await compact(node)
    assert await bases(node, key) == [57, 59], "the last values, and the newest batch, a marker"
    state = (await node.log.states([key]))[key]
    assert (state.high_watermark, state.last_stable_offset) == (60, 60)
    await producer.append(key, (b"a", b"20"))
    await producer.end(committed=True)
    assert await bases(node, key) == [57, 59, 60, 61], "its sequence goes on"


async def test_open_transaction_is_kept_and_aborted_records_are_removed(node: DataPlane, key: PartitionKey) -> None:
    fast, slow = [Producer(node.database, node.log, producer_id) for producer_id in (1, 2)]
    await plain(node, key, (b"a", b"0"))  # 0
    await fast.append(key, (b"a", b"1"))  # 1
    await fast.end(committed=False)  # 2
    await slow.append(key, (b"a", b"2"))  # 3
    await fast.append(key, (b"a", b"3"))  # 4
    await fast.end(committed=True)  # 5
    await plain(node, key, (b"end", b"1"))  # 6
    await compact(node)
    assert await bases(node, key) == [0, 2, 3, 4, 5, 6]
    records, _ = await read_committed(node.log, key)
    assert [(record.offset, record.value) for record in records] == [(0, b"0")]
    await slow.end(committed=False)  # 7
    await compact(node)
    assert await bases(node, key) == [2, 4, 6, 7]
    records, answers = await read_committed(node.log, key)
    assert [(record.offset, record.value) for record in records] == [(4, b"3"), (6, b"1")]
    assert [tuple(each) for answer in answers for each in answer.aborted] == [(1, 1), (2, 3)]


async def test_transaction_that_ends_during_a_run_is_kept_whole(
    node: DataPlane, key: PartitionKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = Producer(node.database, node.log, 1)
    await plain(node, key, (b"a", b"0"))
    await plain(node, key, (b"a", b"1"))
    await producer.append(key, (b"a", b"2"))
    await plain(node, key, (b"end", b"1"))
    begin = CompactionStore.begin

    async def begin_and_end(store: CompactionStore, dirty: DirtyRange) -> CompactionRun:
        await producer.end(committed=False)
        await plain(node, key, (b"end", b"2"))
        return await begin(store, dirty)

    monkeypatch.setattr(CompactionStore, "begin", begin_and_end)
    await compact(node)
    assert await bases(node, key) == [1, 2, 3, 4, 5]
    records, _ = await read_committed(node.log, key)
    assert [record.offset for record in records] == [1, 3, 5]
    monkeypatch.undo()
    await compact(node)
    assert await bases(node, key) == [1, 3, 4, 5]


async def test_retention_of_a_compacted_log_forgets_aborted_transactions(
    node: DataPlane, key: PartitionKey, database_url: str
) -> None:
    producer = Producer(node.database, node.log, 1)
    for version in range(3):
        await producer.append(key, (b"a", b"%d" % version))
        await producer.end(committed=False)
    await plain(node, key, (b"a", b"0"))
    await compact(node)
    assert await bases(node, key) == [1, 3, 5, 6]
    await node.log.delete_records(key, 4)
    await retention.apply(node.database, [retention.RetentionPolicy(key, -1)])
    connection = await asyncpg.connect(database_url)
    assert await connection.fetchval("select array_agg(last_offset) from sluice.aborted_transaction") == [5]
    await connection.close()


class _History:
    """Written records, and those of them that a reader with read_committed may and must see."""

    def __init__(self) -> None:
        self.pairs: dict[int, Pair] = {}
        self.aborted: set[int] = set()

    def wrote(self, base_offset: int, pairs: list[Pair]) -> set[int]:
        written = dict(enumerate(pairs, base_offset))
        self.pairs |= written
        return set(written)

    async def check(self, node: DataPlane, key: PartitionKey, max_bytes: int) -> None:
        before = (await node.log.states([key]))[key].last_stable_offset
        records, answers = await read_committed(node.log, key, max_bytes=max_bytes)
        if not answers:
            assert not before
            return
        right = {offset: pair for offset, pair in sorted(self.pairs.items()) if offset not in self.aborted}
        for record in records:
            assert right[record.offset] == (record.key, record.value), record.offset
        after = answers[-1].state.last_stable_offset
        assert after == before, "nothing is written meanwhile"
        table = {record.key: record.value for record in records}
        expected = dict(pair for offset, pair in right.items() if offset < before)
        assert {k: v for k, v in table.items() if v is not None} == {k: v for k, v in expected.items() if v is not None}


@pytest.mark.parametrize("seed", range(6))
async def test_read_committed_reader_ends_with_the_same_table(node: DataPlane, key: PartitionKey, seed: int) -> None:
    chance = random.Random(seed)
    max_keys = 3 if seed % 2 else MAX_KEYS
    producers = [Producer(node.database, node.log, producer_id) for producer_id in range(1, 5)]
    under_way: dict[int, set[int]] = {}
    history = _History()
    keys = (b"a", b"b", b"c", b"d", b"e")
    for step in range(80):
        pairs: list[Pair] = [
            (chance.choice(keys), None if chance.random() < 0.2 else b"%d.%d" % (step, number))
            for number in range(chance.randrange(1, 4))
        ]
        producer, what = chance.choice(producers), chance.random()
        if what < 0.2:
            history.wrote(await plain(node, key, *pairs), pairs)
        elif what < 0.65:
            written = history.wrote(await producer.append(key, *pairs), pairs)
            under_way.setdefault(producer.producer_id, set()).update(written)
        elif producer.producer_id in under_way:
            committed = what < 0.85
            await producer.end(committed=committed)
            written = under_way.pop(producer.producer_id)
            history.aborted |= set() if committed else written
        if chance.random() < 0.2:
            await history.check(node, key, chance.choice((1, 300, 10**6)))
            if chance.random() < 0.3:
                await merge_chunks(node, key)
            await compact(node, max_keys=max_keys, chunk_bytes=500)
            await history.check(node, key, chance.choice((1, 300, 10**6)))
    for producer in producers:
        if producer.producer_id in under_way:
            await producer.end(committed=True)
    await plain(node, key, (b"end", b"1"))
    for _ in range(30):
        await compact(node, max_keys=max_keys, chunk_bytes=500)
    history.wrote((await bases(node, key))[-1], [(b"end", b"1")])
    await history.check(node, key, 1000)
    controls = [batch for batch in (await read(node.log, key)).batches if read_head(batch.records).is_control]
    assert {control_type_of(batch.records) for batch in controls} == {ControlType.ABORT}


async def merge_chunks(node: DataPlane, key: PartitionKey) -> None:
    async def pages() -> AsyncIterator[list[Chunk]]:
        yield await node.log.chunks_between(key, 0, 2**62)

    await Mover(node.database, node.log, None).move(pages())


async def test_writers_readers_and_compaction_at_the_same_time(node: DataPlane, key: PartitionKey) -> None:
    """A record's value shows whether a reader must see it. Each key belongs to one producer, which counts the key's
    versions.
    """
    newest: dict[bytes, int] = {}

    async def write(producer_id: int) -> None:
        chance = random.Random(producer_id)
        producer = Producer(node.database, node.log, producer_id)
        name = b"%d" % producer_id
        for version in range(25):
            committed = chance.random() < 0.6
            word = b"seen" if committed else b"unseen"
            for number in range(chance.randrange(1, 3)):
                await producer.append(key, (name, b"%s.%d" % (word, version)), (b"x%d" % number, word))
            await producer.end(committed=committed)
            if committed:
                newest[name] = version

    async def keep_compacting() -> None:
        while True:
            await compact(node)
            await asyncio.sleep(0.005)

    async def keep_reading() -> None:
        newest_seen = dict.fromkeys((b"1", b"2", b"3"), -1)
        while True:
            records, _ = await read_committed(node.log, key, max_bytes=400)
            assert not [record for record in records if (record.value or b"").startswith(b"unseen")]
            table = {record.key: record.value for record in records}
            for name, before in newest_seen.items():
                now = int((table.get(name) or b"seen.-1").removeprefix(b"seen."))
                assert now >= before, "what was committed has gone"
                newest_seen[name] = now
            await asyncio.sleep(0.002)

    async with asyncio.TaskGroup() as group:
        others = [group.create_task(keep_compacting()), group.create_task(keep_reading())]
        await asyncio.gather(*(write(producer_id) for producer_id in range(1, 4)))
        for other in others:
            other.cancel()
    await plain(node, key, (b"end", b"1"))
    await compact(node)
    records, _ = await read_committed(node.log, key)
    table = {record.key: record.value for record in records}
    for name, version in newest.items():
        assert table[name] == b"seen.%d" % version
    assert len(records) <= 8
