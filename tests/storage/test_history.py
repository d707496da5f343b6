"""A database that lacks what it acknowledged is another history, however little is gone and however long its log is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import asyncpg
import pytest

from storage.errors import StorageUnavailable
from storage.history import HistoryStore
from storage.log import LogStore
from storage.migrate import migrate
from storage.pool import Database
from storage.topics import TopicStore
from storage.types import NewTopic, PartitionKey, Topic
from tests.restorable_postgres import RestorablePostgres
from tests.storage.batches import append, new_batch

DEADLINE_S = 30.0

T = TypeVar("T")


class Node:
    """What a node has of a database, without its passes: nobody renews anything."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.history = HistoryStore(database)
        self.log = LogStore(database)

    @classmethod
    async def open(cls, url: str) -> Node:
        node = cls(await Database.open(url))
        await migrate(node.database)
        node.history.accept(*await node.history.adopt())
        return node

    async def topic(self) -> PartitionKey:
        (topic,) = await TopicStore(self.database).create([NewTopic("orders", 1, {})])
        assert isinstance(topic, Topic)
        return topic.partitions[0].partition_key

    async def close(self) -> None:
        await self.log.close()
        await self.database.close()


async def once_reached(work: Callable[[], Awaitable[T]]) -> T:
    """Again while connections that a stopped server took along are found out."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await work()
            except StorageUnavailable as error:
                if "another history" in str(error):
                    raise
                await asyncio.sleep(0.02)


async def grow_log(url: str) -> None:
    """To longer than it has ever been, as a server does by itself in time; it commits nothing."""
    connection = await asyncpg.connect(url)
    try:
        for _ in range(2):
            await connection.execute(
                "select pg_logical_emit_message(false, 'test', repeat('x', 1000)), pg_switch_wal()"
            )
        await connection.execute("checkpoint")
    finally:
        await connection.close()


@pytest.mark.parametrize("grown", [False, True], ids=["shorter log", "longer log"])
async def test_one_lost_append_is_another_history(restorable: RestorablePostgres, *, grown: bool) -> None:
    node = await Node.open(restorable.url)
    try:
        key = await node.topic()
        await append(node.log, new_batch(key))
        restorable.save()
        assert await once_reached(lambda: append(node.log, new_batch(key))) == [1]
        restorable.put_back()
        if grown:
            await grow_log(restorable.url)
        with pytest.raises(StorageUnavailable, match="another history"):
            await once_reached(lambda: append(node.log, new_batch(key)))
        before = node.history.history
        async with asyncio.timeout(DEADLINE_S):
            await node.history.changed()
        node.history.accept(*await node.history.adopt())
        assert node.history.history > before
        assert await once_reached(lambda: append(node.log, new_batch(key))) == [1], "given a second time"
    finally:
        await node.close()


async def test_a_restart_that_lost_nothing_is_the_same_history(restorable: RestorablePostgres) -> None:
    node = await Node.open(restorable.url)
    try:
        key = await node.topic()
        for offset in range(5):
            assert await once_reached(lambda: append(node.log, new_batch(key))) == [offset]
            restorable.stop()
            restorable.start()
        assert not node.database.guard.broken.is_set()
    finally:
        await node.close()


async def test_what_is_too_old_to_be_known_is_no_loss(restorable: RestorablePostgres) -> None:
    """Postgres forgets what became of transactions that every row knows of."""
    node = await Node.open(restorable.url)
    try:
        await append(node.log, new_batch(await node.topic()))
        node.database.guard.acknowledged(node.history.history, 3, 0)  # of initdb
        restorable.stop()
        restorable.start()
        await once_reached(lambda: node.database.hot.fetch("select 1"))
    finally:
        await node.close()
