"""Statements that Postgres reads only after their connection was lost: they take no effect behind later ones."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import asyncpg
import pytest

from storage.errors import StorageUnavailable
from storage.log import LogStore
from storage.offsets import OffsetStore
from storage.pool import Database, LostSessions
from storage.types import CoordinatorLease, OffsetCommit, PartitionKey, Refusal
from tests.cluster.proxy import PostgresProxy, proxied
from tests.steps.waiting import until
from tests.storage.batches import append, new_batch, offsets, read
from tests.storage.conftest import MakeTopic


@pytest.fixture
def proxy(database_url: str) -> Iterator[PostgresProxy]:
    with proxied(database_url) as running:
        yield running


@pytest.fixture
async def distant(proxy: PostgresProxy) -> AsyncIterator[Database]:
    """The database, reached through the proxy."""
    opened = await Database.open(proxy.url)
    yield opened
    await opened.close()


async def _server_process(database: Database) -> int:
    return await database.hot.fetch_value("select pg_backend_pid()")


class _Closed:
    """A connection that is lost as soon as its end is listened to."""

    def add_termination_listener(self, callback: Callable[[object], None]) -> None:
        callback(self)


async def _until_ended(sql: asyncpg.Connection, process_id: int) -> None:
    """Wait until a server process has read everything that its connection held, and has ended."""
    ended = "select not exists (select from pg_stat_activity where pid = $1)"
    await until(lambda: sql.fetchval(ended, process_id), "the server process ends")


async def test_batch_read_late_is_not_written_after_its_successor_was_refused(
    distant: Database, proxy: PostgresProxy, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    """librdkafka numbers its batches anew, from a new epoch, when one of them is refused for its sequence. It does so
    because the batch before it has failed and, as far as it knows, cannot be written any more.
    """
    log = LogStore(distant)
    await append(log, new_batch(key, producer=(7, 0, 0)))
    process_id = await _server_process(distant)
    proxy.hold_open_connections()
    lost = asyncio.create_task(log.append([new_batch(key, producer=(7, 0, 1))]))
    await proxy.lose_held_statement()
    with pytest.raises(StorageUnavailable):
        await lost
    assert await log.append([new_batch(key, producer=(7, 0, 2))]) == [Refusal.OUT_OF_ORDER_SEQUENCE]
    proxy.heal()
    await _until_ended(sql, process_id)
    assert await append(log, new_batch(key, producer=(7, 1, 0))) == [1]
    assert offsets((await read(log, key)).batches) == [(0, 0), (1, 1)]


async def test_commit_read_late_does_not_replace_a_later_one(
    distant: Database,
    proxy: PostgresProxy,
    make_topic: MakeTopic,
    leases: list[CoordinatorLease],
    sql: asyncpg.Connection,
) -> None:
    store = OffsetStore(distant)
    topic = await make_topic("orders", 1)

    def commit(offset: int) -> OffsetCommit:
        return OffsetCommit(leases[0], "simple", -1, topic.topic_id, 0, offset, -1, "")

    assert await store.commit([commit(100)]) == [None]
    process_id = await _server_process(distant)
    proxy.hold_open_connections()
    lost = asyncio.create_task(store.commit([commit(200)]))
    await proxy.lose_held_statement()
    with pytest.raises(StorageUnavailable):
        await lost
    assert await store.commit([commit(300)]) == [None]
    proxy.heal()
    await _until_ended(sql, process_id)
    assert [found.committed_offset for found in await store.fetch("simple")] == [300]


async def test_server_process_with_the_id_of_a_lost_one_goes_on(
    database: Database, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    """A container that is started again gives its processes the same ids."""
    process_id = await _server_process(database)
    start = "select backend_start - interval '1 hour' from pg_stat_activity where pid = $1"
    lost = LostSessions()
    started_at = await sql.fetchval(start, process_id)
    assert started_at is not None
    lost.watch(cast(Any, _Closed()), process_id, started_at)
    async with database.cold.connection() as connection:
        await lost.end(connection)
    assert not lost.any
    assert await _server_process(database) == process_id


async def test_server_process_that_does_not_end_keeps_later_statements_back(
    distant: Database, proxy: PostgresProxy, sql: asyncpg.Connection
) -> None:
    """The server process may still execute its statement. SIGSTOP stands for a process that Postgres cannot end."""
    process_id = await _server_process(distant)
    os.kill(process_id, signal.SIGSTOP)
    try:
        proxy.reset()
        with pytest.raises(StorageUnavailable):
            await distant.hot.fetch("select 1")
        with pytest.raises(StorageUnavailable, match="does not end"):
            await distant.hot.fetch("select 1")
    finally:
        os.kill(process_id, signal.SIGCONT)
    await _until_ended(sql, process_id)
    assert await distant.hot.fetch_value("select 1") == 1


async def test_statement_without_an_answer_does_not_wait_for_its_cancellation(database_url: str) -> None:
    """SIGSTOP stands for a server that does not respond."""
    database = await Database.open(database_url, hot_connections=1, cold_connections=1, statement_timeout_ms=1_000)
    process_id = await _server_process(database)
    os.kill(process_id, signal.SIGSTOP)
    try:
        async with asyncio.timeout(5):
            with pytest.raises(StorageUnavailable, match="no answer in time"):
                await database.hot.fetch("select 1")
    finally:
        os.kill(process_id, signal.SIGCONT)
        await database.close()
