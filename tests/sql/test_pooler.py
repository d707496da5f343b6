"""The SQL door through PgBouncer in transaction mode, as an application's pooler runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from confluent_kafka import Consumer

from tests.gateway_process import GatewayProcess
from tests.pooler import admit_pooler, pooler
from tests.sql.reading import read, values

Connection = asyncpg.Connection


@pytest.fixture
async def pooled(gateway: GatewayProcess, sql: Connection, tmp_path: Path) -> AsyncIterator[tuple[Connection, ...]]:
    """Two clients of a pooler that has one connection to Postgres for both."""
    assert gateway.database_url is not None
    await admit_pooler(sql)
    with pooler(gateway.database_url, tmp_path, mode="transaction", ignored="extra_float_digits", servers=1) as url:
        # PgBouncer before 1.21, as in Debian 12, cannot move a prepared statement to another server connection. So a
        # client keeps no prepared statement across transactions.
        connections = [await asyncpg.connect(url, statement_cache_size=0) for _ in range(2)]
        yield tuple(connections)
        for connection in connections:
            await connection.close()


async def test_transactions_of_two_clients_share_one_server(
    pooled: tuple[Connection, Connection], topic: str, consumer: Consumer
) -> None:
    first, second = pooled
    produce = "select kafka.produce($1, $2, partition => 0)"
    for number in range(20):
        client = number % 2
        async with pooled[client].transaction():
            prepared = await pooled[client].prepare(produce)
            await prepared.fetchval(topic, f"{number}")
            savepoint = pooled[client].transaction()
            await savepoint.start()
            await prepared.fetchval(topic, f"{number} rolled back")
            await savepoint.rollback()
            async with pooled[client].transaction():
                await prepared.fetchval(topic, f"{number} released")
    transaction = first.transaction()
    await transaction.start()
    await first.execute(produce, topic, "rolled back")
    # Wait until the pooler's connection is free.
    waiting = asyncio.ensure_future(second.execute(produce, topic, "last"))
    await transaction.rollback()
    await waiting
    expected = [text for number in range(20) for text in (f"{number}", f"{number} released")]
    found = [value.decode() for value in values(read(consumer, topic, 41, none_more_s=0.3))]
    assert found == [*expected, "last"]
    assert await first.fetchval("select pg_backend_pid()") == await second.fetchval("select pg_backend_pid()")


async def test_a_position_is_committed_with_results(pooled: tuple[Connection, Connection], topic: str) -> None:
    first, second = pooled
    commit = "select kafka.commit_offset($1, $2, 0, $3)"
    async with first.transaction():
        await first.execute("create table pooled_totals (n integer)")
        await first.execute(commit, "pooled", topic, 1)
    transaction = second.transaction()
    await transaction.start()
    await second.execute(commit, "pooled", topic, 2)
    await transaction.rollback()
    assert await first.fetchval('select "offset" from kafka.committed($1)', "pooled") == 1
