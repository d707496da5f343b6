"""Lost connections, locks that are not granted, exhausted pools: each ends in time, with our own errors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from storage.errors import StorageError, StorageUnavailable
from storage.log import LogStore
from storage.nodes import NodeStore
from storage.pool import Connection, Database
from storage.schema import SEARCH_PATH
from storage.topics import TopicStore
from storage.types import PartitionKey, Refusal
from tests.steps.waiting import until_blocked
from tests.storage.batches import append, new_batch, read

TERMINATE = """
select pg_terminate_backend(pid) from pg_stat_activity
where datname = current_database() and application_name = 'sluice' and pid <> pg_backend_pid()
"""


async def _terminate_all(sql: asyncpg.Connection) -> None:
    await sql.execute(TERMINATE)


async def test_no_connection_looks_up_the_array_types_of_statements(database: Database) -> None:
    values = [[True], [b"\0"], [-1], [2], [2**40], [datetime(2026, 1, 2, tzinfo=UTC)], [UUID(int=3)], ["four"]]
    async with database.hot.connection() as connection:
        asked: list[str] = []
        logged: Any = connection
        logged.add_query_logger(lambda query: asked.append(query.query))
        query = (
            "select $1::bool[], $2::bytea[], $3::int2[], $4::int4[], $5::int8[], $6::timestamptz[], $7::uuid[],"
            " $8::text[]"
        )
        row = await connection.fetchrow(query, *values)
        assert row is not None
        assert list(row.values()) == values
        # This type is looked up, so the logger hears look-ups.
        await connection.fetchrow("select $1::float8[]", [0.5])
        assert asked[0] == query
        assert any("pg_type" in each for each in asked[1:])


async def test_the_call_after_a_lost_connection_works(
    log: LogStore, key: PartitionKey, sql: asyncpg.Connection, database: Database
) -> None:
    await append(log, new_batch(key))
    await asyncio.gather(*(database.hot.fetch("select pg_sleep(0.05)") for _ in range(4)))
    assert database.hot.size == 4
    for _ in range(3):
        await _terminate_all(sql)
        # Each pool may discover the loss by one failing call, however many connections it had.
        for call in (log.states([key]), read(log, key)):
            with contextlib.suppress(StorageUnavailable):
                await call
        assert (await log.states([key]))[key].high_watermark == 1
        assert len((await read(log, key)).batches) == 1


async def test_connections_that_died_while_idle_fail_no_call(sql: asyncpg.Connection, database: Database) -> None:
    await asyncio.gather(*(database.hot.fetch("select pg_sleep(0.05)") for _ in range(4)))
    await sql.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
        "where datname = current_database() and application_name = 'sluice' and pid <> pg_backend_pid()"
    )
    for _ in range(3):
        await sql.fetchval("select 1")  # By then the event loop knows that the connections ended.
    assert await database.hot.fetch_value("select 1") == 1


async def test_a_connection_lost_during_a_write_is_unavailable(
    log: LogStore, key: PartitionKey, sql: asyncpg.Connection, database_url: str
) -> None:
    watcher = await asyncpg.connect(database_url)
    try:
        async with sql.transaction():
            await sql.execute("select from partition where partition_key = $1 for update", key)
            writes = [asyncio.create_task(log.append([new_batch(key, size_bytes=size)])) for size in (100, 1_000_000)]
            await until_blocked(watcher, 2)
            await _terminate_all(watcher)
            for write in writes:
                with pytest.raises(StorageUnavailable):
                    await write
    finally:
        await watcher.close()
    assert await append(log, new_batch(key)) == [0], "nothing of them was written, and nothing holds a lock"


async def test_a_lock_that_is_not_granted_in_time_is_unavailable(
    database_url: str, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    hasty = await Database.open(database_url, statement_timeout_ms=1_000)
    try:
        async with sql.transaction():
            await sql.execute("select from partition where partition_key = $1 for update", key)
            with pytest.raises(StorageUnavailable):
                await LogStore(hasty).append([new_batch(key)])
        assert await append(LogStore(hasty), new_batch(key)) == [0]
    finally:
        await hasty.close()


async def test_a_statement_that_takes_too_long_is_unavailable(database_url: str) -> None:
    hasty = await Database.open(database_url, statement_timeout_ms=1_000)
    try:
        with pytest.raises(StorageUnavailable):
            await hasty.cold.fetch("select pg_sleep(30)")
    finally:
        await hasty.close()


async def test_waiting_for_a_connection_is_bounded(database_url: str) -> None:
    narrow = await Database.open(database_url, hot_connections=1, acquire_timeout_s=0.1)
    try:
        async with narrow.hot.connection():
            with pytest.raises(StorageUnavailable):
                await narrow.hot.fetch("select 1")
            assert await narrow.cold.fetch_value("select 2") == 2, "reads have their own"
        assert await narrow.hot.fetch_value("select 1") == 1
    finally:
        await narrow.close()


async def test_an_address_without_a_listener_is_unavailable() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(StorageUnavailable):
        await Database.open(f"postgresql://nobody@127.0.0.1:{port}/nothing")


async def test_a_server_that_never_answers_is_unavailable() -> None:
    server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        with pytest.raises(StorageUnavailable):
            await Database.open(f"postgresql://nobody@127.0.0.1:{port}/nothing?sslmode=disable", connect_timeout_s=0.2)
    finally:
        server.close()


async def test_a_closed_database_is_unavailable(database_url: str) -> None:
    closed = await Database.open(database_url)
    await closed.close()
    with pytest.raises(StorageUnavailable):
        await closed.hot.fetch("select 1")


async def test_our_own_mistakes_are_not_reported_as_transient(database: Database) -> None:
    for query, arguments in [("select nonsense", ()), ("select $1::integer", ("text",)), ("select 1 / 0", ())]:
        with pytest.raises(StorageError) as caught:
            await database.hot.fetch(query, *arguments)
        assert not isinstance(caught.value, StorageUnavailable)


async def test_a_deadlock_is_retried(database: Database, key: PartitionKey, sql: asyncpg.Connection) -> None:
    runs: list[int] = []

    async def work(connection: Connection) -> str:
        runs.append(1)
        if len(runs) < 3:
            await connection.execute("do $$ begin raise exception 'x' using errcode = '40P01'; end $$")
        await connection.execute("update partition set leader_epoch = leader_epoch + 1")
        return "done"

    assert await database.hot.transact(work) == "done"
    assert len(runs) == 3
    assert await sql.fetchval("select leader_epoch from partition") == 1


async def test_retries_end(database: Database) -> None:
    runs: list[int] = []

    async def work(connection: Connection) -> None:
        runs.append(1)
        await connection.execute("do $$ begin raise exception 'x' using errcode = '40001'; end $$")

    with pytest.raises(StorageUnavailable):
        await database.hot.transact(work)
    assert len(runs) == 4


async def test_no_other_error_is_retried(database: Database) -> None:
    for code in ("57P01", "08006", "23505", "P0001"):
        runs: list[int] = []

        async def work(connection: Connection, code: str = code, runs: list[int] = runs) -> None:
            runs.append(1)
            await connection.execute(f"do $$ begin raise exception 'x' using errcode = '{code}'; end $$")

        with pytest.raises(StorageError):
            await database.hot.transact(work)
        assert len(runs) == 1


async def test_a_cancelled_call_leaves_the_pool_usable(
    log: LogStore, key: PartitionKey, sql: asyncpg.Connection, database: Database
) -> None:
    async with sql.transaction():
        await sql.execute("select from partition where partition_key = $1 for update", key)
        writes = [asyncio.create_task(log.append([new_batch(key)])) for _ in range(4)]
        watcher = await database.cold.fetch_value("select 1")
        assert watcher == 1
        for write in writes:
            write.cancel()
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    assert await append(log, new_batch(key)) == [0]


async def test_sessions_wait_for_the_disk_with_any_server_setting(database_url: str, sql: asyncpg.Connection) -> None:
    name = await sql.fetchval("select current_database()")
    await sql.execute(f'alter database "{name}" set synchronous_commit = off')
    try:
        opened = await Database.open(database_url)
        try:
            for pool in (opened.hot, opened.cold):
                for _ in range(2):  # The second round uses the connection again.
                    assert await pool.fetch_value("select current_setting('synchronous_commit')") == "on"
        finally:
            await opened.close()
        await sql.execute(f'alter database "{name}" set synchronous_commit = remote_apply')
        opened = await Database.open(database_url)
        try:
            assert await opened.hot.fetch_value("select current_setting('synchronous_commit')") == "remote_apply"
        finally:
            await opened.close()
    finally:
        await sql.execute(f'alter database "{name}" reset synchronous_commit')


@pytest.mark.parametrize(
    ("setting", "odd", "pinned"),
    [
        ("default_transaction_isolation", "'repeatable read'", "read committed"),
        ("default_transaction_read_only", "on", "off"),
        ("idle_session_timeout", "'1h'", "0"),
        ("statement_timeout", "'1h'", "10s"),
        ("search_path", "nowhere", SEARCH_PATH),
    ],
)
async def test_defaults_of_the_database_do_not_change_settings_that_we_rely_on(
    database_url: str, sql: asyncpg.Connection, setting: str, odd: str, pinned: str
) -> None:
    name = await sql.fetchval("select current_database()")
    await sql.execute(f'alter database "{name}" set {setting} = {odd}')
    try:
        opened = await Database.open(database_url)
        try:
            for pool in (opened.hot, opened.cold, opened.control):
                assert await pool.fetch_value("select current_setting($1)", setting) == pinned
        finally:
            await opened.close()
    finally:
        await sql.execute("set default_transaction_read_only = off")
        await sql.execute(f'alter database "{name}" reset {setting}')


async def test_two_nodes_append_to_one_partition_of_a_repeatable_read_database(
    database_url: str, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    name = await sql.fetchval("select current_database()")
    await sql.execute(f"alter database \"{name}\" set default_transaction_isolation = 'repeatable read'")
    try:
        databases = [await Database.open(database_url) for _ in range(2)]
        try:
            logs = [LogStore(opened) for opened in databases]
            appended = await asyncio.gather(*(append(logs[i % 2], new_batch(key)) for i in range(40)))
            assert sorted(offset for (offset,) in appended) == list(range(40))
        finally:
            for opened in databases:
                await opened.close()
    finally:
        await sql.execute(f'alter database "{name}" reset default_transaction_isolation')


async def test_a_timeout_is_named_as_such(database_url: str) -> None:
    narrow = await Database.open(database_url, hot_connections=1, acquire_timeout_s=0.05)
    try:
        async with narrow.hot.connection():
            with pytest.raises(StorageUnavailable, match="no answer in time"):
                await narrow.hot.fetch("select 1")
    finally:
        await narrow.close()


async def test_leases_and_readiness_do_not_wait_for_requests(database_url: str) -> None:
    """Eight thousand groups that joined at once took every connection, and the node lost its leases."""
    narrow = await Database.open(database_url, hot_connections=1, cold_connections=1, acquire_timeout_s=0.05)
    try:
        nodes, topics = NodeStore(narrow), TopicStore(narrow)
        async with narrow.hot.connection(), narrow.cold.connection():
            node_id = await nodes.register("localhost:9092", {"PLAINTEXT": ("localhost", 9092)}, None, 60_000)
            await nodes.renew(node_id, 60_000)
            assert len(await nodes.acquire_leases(node_id, [0, 1], 60_000)) == 2
            assert await topics.revision() > 0
    finally:
        await narrow.close()


async def test_an_unknown_partition_is_a_refusal_not_an_error(log: LogStore) -> None:
    assert await log.append([new_batch(PartitionKey(10**9))]) == [Refusal.UNKNOWN_PARTITION]
