"""Share partitions that another node has changed or led, and loads and writes that were overtaken or failed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.coordinator.share.partition import Acquire, SharePartition
from gateway.share import partitions as module
from gateway.share.partitions import SharePartitions
from protocol.errors import ErrorCode, KafkaError
from storage.pool import Database
from storage.share import ShareKey, ShareRow, ShareStore
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


async def test_leadership_that_left_and_returned_causes_a_new_read(database: Database, keys: list[ShareKey]) -> None:
    x, y = SharePartitions(ShareStore(database)), SharePartitions(ShareStore(database))
    await x.load(keys[0], beginning, LONG)
    await y.load(keys[0], nowhere, LONG)
    assert await acquire(y, keys[0], B) == 4
    assert (await y.apply(keys[0], accepted(0, 3, B))).error is ErrorCode.NONE
    # Node x leads the partition again, and a client begins to read it there.
    await x.verify(keys)
    at = await x.load(keys[0], nowhere, LONG)
    taken = await x.apply(keys[0], Acquire(A, at.next_offset, 4, ((at.next_offset, 3),), 500))
    assert taken.acquired == (), "acknowledged records are delivered again"


async def test_reset_by_another_node_is_noticed(database: Database, keys: list[ShareKey]) -> None:
    x = await begun(ShareStore(database), keys[0])
    await acquire(x, keys[0])
    await x.apply(keys[0], accepted(0, 3))
    assert await ShareStore(database).alter("s", {(keys[0].topic_id, 0): 0})
    await x.verify(keys)
    assert await x.load(keys[0], nowhere, LONG) == SharePartition(0), "the reset is not seen"


async def test_partition_with_a_restarted_epoch_is_read_again(database: Database, keys: list[ShareKey]) -> None:
    store = ShareStore(database)
    x = await begun(store, keys[0])
    await acquire(x, keys[0])
    assert await store.delete("s", [keys[0].topic_id])
    y = await begun(store, keys[0])
    assert await acquire(y, keys[0], B) == 4
    with pytest.raises(KafkaError):
        await x.apply(keys[0], accepted(0, 3))
    assert (await store.offsets("s", SETTLED))[keys[0].topic_id, 0].start_offset == 0


async def test_recreated_group_does_not_use_the_old_partitions(database: Database, keys: list[ShareKey]) -> None:
    x = await begun(ShareStore(database), keys[0])
    await acquire(x, keys[0])
    await x.apply(keys[0], accepted(0, 3))
    await database.cold.fetch("delete from sluice.consumer_group where group_id = 's'")
    await x.verify(keys)
    assert await refused(x.load(keys[0], beginning, LONG)) is ErrorCode.GROUP_ID_NOT_FOUND


async def test_unchanged_share_partition_is_kept(database: Database, keys: list[ShareKey]) -> None:
    x = await begun(ShareStore(database), keys[0])
    assert await acquire(x, keys[0]) == 4
    await x.verify(keys)
    assert (await x.apply(keys[0], accepted(0, 3))).error is ErrorCode.NONE


async def test_a_deleted_group_is_forgotten_alone(database: Database, keys: list[ShareKey]) -> None:
    x = await begun(ShareStore(database), *keys)
    x.drop_group("another")
    assert x.count == len(keys)
    x.drop_group("s")
    assert x.count == 0


async def test_a_repeated_acknowledgement_waits(database: Database, keys: list[ShareKey]) -> None:
    store = Halting(database)
    x = await begun(store, keys[0])
    await acquire(x, keys[0])
    store.gate.clear()
    first = asyncio.create_task(x.apply(keys[0], accepted(0, 3)))
    await store.tries.acquire()
    again = asyncio.create_task(x.apply(keys[0], accepted(0, 3)))
    for _ in range(10):
        await asyncio.sleep(0)
    early = again.done()
    stored = (await ShareStore(database).offsets("s", SETTLED))[keys[0].topic_id, 0]
    store.gate.set()
    await first
    assert not early, f"told {again.result().error!r} while Postgres has {stored}"


async def test_bug_in_a_write_answers_all_waiting_requests(database: Database, keys: list[ShareKey]) -> None:
    class Broken(ShareStore):
        async def write(self, rows: Any) -> list[bool]:
            raise RuntimeError("a bug")

    x = SharePartitions(Broken(database))
    await x.load(keys[0], beginning, LONG)
    await acquire(x, keys[0])
    with pytest.raises(KafkaError):
        await asyncio.wait_for(x.apply(keys[0], accepted(0, 3)), 3)


async def test_patience_applies_to_every_caller(
    database: Database, keys: list[ShareKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    monkeypatch.setattr(module, "WRITTEN_AT_A_TIME", 1)
    store = Halting(database)
    x = SharePartitions(store, patience_s=0.5)
    for key in keys:
        await x.load(key, beginning, LONG)
        await acquire(x, key)
    store.failing = True
    loop = asyncio.get_running_loop()
    begun_s = loop.time()

    async def timed(key: ShareKey) -> float:
        await refused(x.apply(key, accepted(0, 3)))
        return loop.time() - begun_s

    took = await asyncio.gather(*map(timed, keys))
    assert max(took) < 1.0, took


async def test_forget_while_loading(database: Database, keys: list[ShareKey]) -> None:
    class Slow(ShareStore):
        async def lead(self, key: ShareKey) -> ShareRow | None:
            row = await super().lead(key)
            reading.set()
            await gate.wait()
            return row

    reading, gate = asyncio.Event(), asyncio.Event()
    await begun(ShareStore(database), keys[0])
    x = SharePartitions(Slow(database))
    loading = asyncio.create_task(x.load(keys[0], nowhere, LONG))
    await reading.wait()
    x.forget()
    gate.set()
    await asyncio.gather(loading, return_exceptions=True)
    assert x.count == 0, "read before, kept after"


async def test_a_reset_while_loading(database: Database, keys: list[ShareKey]) -> None:
    class Slow(ShareStore):
        async def lead(self, key: ShareKey) -> ShareRow | None:
            row = await super().lead(key)
            reading.set()
            await gate.wait()
            return row

    reading, gate = asyncio.Event(), asyncio.Event()
    await begun(ShareStore(database), keys[0])
    x = SharePartitions(Slow(database))
    loading = asyncio.create_task(x.load(keys[0], nowhere, LONG))
    await reading.wait()
    assert await ShareStore(database).alter("s", {(keys[0].topic_id, 0): 3})
    x.drop([keys[0]])
    gate.set()
    await asyncio.gather(loading, return_exceptions=True)
    assert await x.load(keys[0], nowhere, LONG) == SharePartition(3)
