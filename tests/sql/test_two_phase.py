"""PREPARE TRANSACTION on a Postgres that allows it: no transaction with staged records or offsets is prepared."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest

from storage.embedded import EmbeddedPostgres
from tests.gateway_process import GatewayFactory
from tests.postgres import LoopThread, cluster_directory
from tests.sql.conftest import create_topic
from tests.sql.offsets import COMMIT

Connection = asyncpg.Connection


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    loop = LoopThread()
    with cluster_directory() as directory:
        server = EmbeddedPostgres(directory / "server", settings={"max_prepared_transactions": "5"})
        yield loop.run(server.start())
        loop.run(server.stop())
    loop.close()


@pytest.fixture
async def sql(url: str) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(url)
    yield connection
    await connection.close()


STATEMENTS = [
    "prepare transaction 'x'",
    "prepare transaction 'it''s'",
    r"prepare transaction E'it\'s'",
    "prepare transaction 'x'\n'y'",
    "prepare transaction U&'x' uescape '!'",
    "prepare --\rtransaction 'x'",
    "prepare transaction 'x'; select 1",
    "select 'a'; PREPARE/**/TRANSACTION $$x$$",
]


async def test_no_spelling_prepares_a_transaction(gateway_factory: GatewayFactory, url: str, sql: Connection) -> None:
    gateway = gateway_factory(database_url=url)
    create_topic(gateway, "t", 1)
    for statement in STATEMENTS:
        await sql.execute("begin")
        await sql.execute("select pg_current_xact_id()")
        await sql.execute(statement)
        (name,) = [row["gid"] for row in await sql.fetch("select gid from pg_prepared_xacts")]
        await sql.execute(f"rollback prepared '{name.replace(chr(39), 2 * chr(39))}'")
        for staged, *arguments in (("select kafka.produce($1, 'v')", "t"), (COMMIT, "g", "t", 0, 1, None, None)):
            await sql.execute("begin")
            await sql.execute(str(staged), *arguments)
            with pytest.raises(asyncpg.FeatureNotSupportedError):
                await sql.execute(statement)
            assert await sql.fetch("select gid from pg_prepared_xacts") == [], statement
    # The refused statements have left nothing behind that a commit waits for.
    other = await asyncpg.connect(url)
    for connection in (sql, other):
        async with connection.transaction():
            await connection.execute("select kafka.produce('t', 'prepare this')")
            await connection.execute(COMMIT, "g", "t", 0, 2, None, None)
    await other.close()
    assert await sql.fetchval("select kafka.flush('20 seconds')")
    assert await sql.fetchval("select end_offset from kafka.partitions where topic = 't'") == 2
