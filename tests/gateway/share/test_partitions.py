"""Share partitions in a node's memory, on a real Postgres: durability, fences, locks, watches, memory limits."""

from __future__ import annotations

import asyncio

import pytest

from gateway.coordinator.share.partition import (
    LogStartMoved,
    PartitionSettings,
    Range,
    RecordState,
    SharePartition,
)
from gateway.share import partitions as module
from gateway.share.partitions import SharePartitions
from protocol.errors import ErrorCode
from storage.pool import Database
from storage.share import ShareKey, ShareRow, ShareStand, ShareStore
from tests.gateway.share.partitions import (
    LONG,
    SETTLED,
    A,
    B,
    Halting,
    accepted,
    acquire,
    beginning,
    begun,
    nowhere,
    refused,
)
from tests.gateway.share.partitions import database as database
from tests.gateway.share.partitions import keys as keys

SHORT = PartitionSettings(record_lock_duration_ms=50)


async def test_acknowledgement_is_durable_before_its_answer(database: Database, keys: list[ShareKey]) -> None:
    store = Halting(database)
    partitions = await begun(store, keys[0])
    assert await acquire(partitions, keys[0]) == 4
    store.gate.clear()
    telling = asyncio.create_task(partitions.apply(keys[0], accepted(1, 2)))
    await store.tries.acquire()
    assert not telling.done()
    assert (await ShareStore(database).offsets("s", SETTLED))[keys[0].topic_id, 0] == ShareStand(0, 0)
    store.gate.set()
    assert (await telling).error is ErrorCode.NONE
    again = await SharePartitions(ShareStore(database)).load(keys[0], nowhere, LONG)
    assert [(len(each), each.state, each.delivery_count) for each in again.ranges] == [
        (1, RecordState.AVAILABLE, 1),
        (2, RecordState.ACKNOWLEDGED, 1),
        (1, RecordState.AVAILABLE, 1),
    ]


async def test_many_are_written_together(database: Database, keys: list[ShareKey]) -> None:
    store = Halting(database)
    partitions = await begun(store, *keys)
    for key in keys:
        assert await acquire(partitions, key) == 4
    await asyncio.gather(*(partitions.apply(key, accepted(0, 3)) for key in keys))
    assert store.tried == 1
    assert [row.start_offset for row in (await store.offsets("s", SETTLED)).values()] == [4, 4, 4, 4]


async def test_overtaken_node_refuses_and_reads_again(database: Database, keys: list[ShareKey]) -> None:
    one, two = [await begun(ShareStore(database), keys[0]) for _ in range(2)]
    assert await acquire(one, keys[0]) == 4
    assert await refused(one.apply(keys[0], accepted(0, 0))) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert one.count == 0
    assert await acquire(two, keys[0], B) == 4
    assert (await two.apply(keys[0], accepted(0, 0, B))).error is ErrorCode.NONE
    assert await one.load(keys[0], nowhere, LONG) == SharePartition(1, (Range(1, 3, RecordState.AVAILABLE, 1),))


async def test_a_write_is_tried_again_and_then_given_up(
    database: Database, keys: list[ShareKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    store = Halting(database)
    partitions = await begun(store, keys[0])
    await acquire(partitions, keys[0])
    store.failing = True
    telling = asyncio.create_task(partitions.apply(keys[0], accepted(0, 0)))
    for _ in range(3):
        await store.tries.acquire()
    store.failing = False
    assert (await telling).error is ErrorCode.NONE
    impatient = SharePartitions(store, patience_s=0.0)
    await impatient.load(keys[0], nowhere, LONG)
    assert await acquire(impatient, keys[0]) == 3
    store.failing = True
    assert await refused(impatient.apply(keys[0], accepted(1, 1))) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert impatient.count == 0


async def test_expired_locks_wake_waiting_fetches(database: Database, keys: list[ShareKey]) -> None:
    partitions = await begun(ShareStore(database), keys[0], settings=SHORT)
    assert await acquire(partitions, keys[0]) == 4
    woken = asyncio.Event()
    watch = partitions.watch(woken.set)
    watch.add(keys[0])
    assert await acquire(partitions, keys[0], B) == 0
    await asyncio.wait_for(woken.wait(), 10)
    watch.close()
    assert await acquire(partitions, keys[0], B) == 4
    assert (await partitions.apply(keys[0], accepted(0, 0, A))).error is ErrorCode.INVALID_RECORD_STATE


async def test_release_wakes_open_watches_alone(database: Database, keys: list[ShareKey]) -> None:
    partitions = await begun(ShareStore(database), *keys[:2])
    woken: list[str] = []
    watches = {name: partitions.watch(lambda name=name: woken.append(name)) for name in ("first", "closed", "other")}
    watches["first"].add(keys[0])
    watches["closed"].add(keys[0])
    watches["other"].add(keys[1])
    watches["closed"].close()
    await acquire(partitions, keys[0])
    assert woken == []
    partitions.release(A, keys)
    assert woken == ["first"]
    assert await acquire(partitions, keys[0], B) == 4
    await partitions.close()
    restored = await SharePartitions(ShareStore(database)).load(keys[0], nowhere, LONG)
    assert [each.delivery_count for each in restored.ranges] == [2]


async def test_records_missing_from_the_log_are_skipped(database: Database, keys: list[ShareKey]) -> None:
    partitions = await begun(ShareStore(database), keys[0])
    await acquire(partitions, keys[0])
    await partitions.apply(keys[0], LogStartMoved(2))
    assert await SharePartitions(ShareStore(database)).load(keys[0], nowhere, LONG) == SharePartition(
        2, (Range(2, 3, RecordState.AVAILABLE, 1),)
    )


async def test_partition_of_a_deleted_group_is_not_created(database: Database, keys: list[ShareKey]) -> None:
    partitions = SharePartitions(ShareStore(database))
    missing = keys[0]._replace(group_id="nobody")
    assert await refused(partitions.load(missing, beginning, LONG)) is ErrorCode.GROUP_ID_NOT_FOUND
    assert await refused(partitions.apply(missing, accepted(0, 0))) is ErrorCode.NOT_LEADER_OR_FOLLOWER


async def test_concurrent_loads_read_once(database: Database, keys: list[ShareKey]) -> None:
    class Counting(ShareStore):
        reads = 0

        async def lead(self, key: ShareKey) -> ShareRow | None:
            self.reads += 1
            return await super().lead(key)

    store = Counting(database)
    partitions = SharePartitions(store)
    both = await asyncio.gather(*(partitions.load(keys[0], beginning, LONG) for _ in range(2)))
    assert both == [SharePartition(0), SharePartition(0)]
    assert store.reads == 1


async def test_memory_is_bounded_and_acquired_records_stay(database: Database, keys: list[ShareKey]) -> None:
    partitions = SharePartitions(ShareStore(database), max_partitions=2)
    for key in keys[:2]:
        await partitions.load(key, beginning, LONG)
        assert await acquire(partitions, key) == 4
    assert await refused(partitions.load(keys[2], beginning, LONG)) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    await partitions.apply(keys[0], accepted(0, 3))
    assert await partitions.load(keys[2], beginning, LONG) == SharePartition(0)
    assert partitions.count == 2
    assert await refused(partitions.apply(keys[0], accepted(0, 0))) is ErrorCode.NOT_LEADER_OR_FOLLOWER


async def test_partition_is_read_again_in_another_history(database: Database, keys: list[ShareKey]) -> None:
    partitions = await begun(ShareStore(database), *keys)
    await acquire(partitions, keys[0])
    partitions.forget()
    assert partitions.count == 0
    assert await partitions.load(keys[0], nowhere, LONG) == SharePartition(0)
