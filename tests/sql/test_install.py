"""Installing the public schema."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import asyncpg
import pytest

from gateway.sql_door import NAMES, changed_settings
from storage.errors import StorageError
from storage.pool import Database
from storage.sql_door import DoorSettings, install

SETTINGS = DoorSettings(1_048_588, False, True, False, False, [], False, 2**63 - 1, 3_600_000)


async def test_the_schema_is_installed_again_after_a_restore_that_lacks_it(database_url: str) -> None:
    database = await Database.open(database_url)
    sql = await asyncpg.connect(database_url)
    try:
        for _ in range(2):
            await install(database, "kafka", SETTINGS)
            await sql.fetch("select * from kafka.topics")
            await sql.execute("drop schema kafka cascade")
    finally:
        await sql.close()
        await database.close()


async def test_a_schema_of_the_users_is_refused_and_another_name_works(database_url: str) -> None:
    database = await Database.open(database_url)
    sql = await asyncpg.connect(database_url)
    try:
        await sql.execute("create schema kafka; create table kafka.mine (a integer)")
        with pytest.raises(StorageError, match="already has a schema kafka: choose another name"):
            await install(database, "kafka", SETTINGS)
        await install(database, "events", SETTINGS)
        async with sql.transaction():
            await sql.execute("select events.produce('t', 'v', 'k')")
        assert await sql.fetchval("select count(*) from sluice.staged_commit") == 1
        assert await sql.fetchval("select count(*) from kafka.mine") == 0
    finally:
        await sql.close()
        await database.close()


async def test_a_node_returns_to_a_former_name_of_the_schema(database_url: str) -> None:
    """During a rolling change of `sql.schema`, a node that crashes starts again with the former name."""
    database = await Database.open(database_url)
    sql = await asyncpg.connect(database_url)
    try:
        await install(database, "kafka", SETTINGS)
        await sql.execute("drop function kafka.flush")
        await install(database, "events", SETTINGS)
        await install(database, "kafka", SETTINGS)
        await sql.execute("select kafka.produce('t', 'v', 'k'); select events.produce('t', 'v', 'k')")
        assert await sql.fetchval("select to_regprocedure('kafka.flush(interval)') is not null")
    finally:
        await sql.close()
        await database.close()


async def test_roles_that_are_created_later_get_their_rights_from_the_next_node(database_url: str) -> None:
    """A node whose own role may not create roles leaves that to an administrator."""
    database = await Database.open(database_url)
    sql = await asyncpg.connect(database_url)
    drop = "drop owned by granted_writer, granted_reader; drop role granted_writer, granted_reader"
    try:
        await install(database, "granted", SETTINGS)
        await sql.execute(f"{drop}; create role granted_writer; create role granted_reader")
        await install(database, "granted", SETTINGS)
        for role, call in (
            ("granted_reader", "count(*) from granted.topics"),
            ("granted_writer", "granted.produce('t', 'v')"),
        ):
            async with sql.transaction():
                await sql.execute(f"set local role {role}; select {call}")
    finally:
        await sql.execute(drop)
        await sql.close()
        await database.close()


async def test_a_node_keeps_the_functions_of_a_later_release(database_url: str) -> None:
    database = await Database.open(database_url)
    sql = await asyncpg.connect(database_url)
    try:
        await install(database, "kafka", SETTINGS)
        await sql.execute(
            """update sluice.sql_door set version = 1000, digest = 'later';
            create or replace function kafka.flush(timeout interval default '1 second') returns boolean
            language sql as 'select null::boolean'"""
        )
        await install(database, "kafka", replace(SETTINGS, max_message_bytes=7))
        assert await sql.fetchval("select kafka.flush()") is None
        row = await sql.fetchrow("select version, digest, max_message_bytes from sluice.sql_door")
        assert row is not None
        assert tuple(row) == (1000, "later", 7)
    finally:
        await sql.close()
        await database.close()


async def test_functions_are_replaced_while_a_transaction_that_produced_is_open(database_url: str) -> None:
    database = await Database.open(database_url)
    sql, other = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
    try:
        await install(database, "kafka", SETTINGS)
        async with sql.transaction():
            await sql.execute("select kafka.produce('t', 'v', 'k')")
            await other.execute("update sluice.sql_door set digest = 'of another release'")
            # A node's session that waited for a lock would fail after 5 s.
            async with asyncio.timeout(60):
                await install(database, "kafka", SETTINGS)
                await other.execute("select kafka.produce('t', 'v', 'k')")
        assert await sql.fetchval("select count(*) from sluice.staged_commit") == 2
    finally:
        await sql.close()
        await other.close()
        await database.close()


async def test_no_transaction_shares_its_number_with_one_of_a_restored_database(database_url: str) -> None:
    """A backup may hold records that no node had appended. Their transactions had numbers of another server, which may
    lie ahead here."""
    database = await Database.open(database_url)
    sql = await asyncpg.connect(database_url)
    try:
        await install(database, "kafka", SETTINGS)
        restored = await sql.fetchval("select pg_current_xact_id()::text::bigint + 30")
        await sql.execute(
            "insert into sluice.staged_record (xid, topic, timestamp_ms, arms) values ($1, 'restored', 0, true)",
            restored,
        )
        await sql.execute("insert into sluice.staged_commit (xid) values ($1)", restored)
        await install(database, "kafka", SETTINGS)
        for _ in range(50):
            await sql.execute("select kafka.produce('t', 'v')")
        places = await sql.fetch("select xid from sluice.staged_commit")
        staged = await sql.fetch("select distinct xid from sluice.staged_record")
        assert {row["xid"] for row in places} == {row["xid"] for row in staged}
        assert len(places) == 51
    finally:
        await sql.close()
        await database.close()


async def test_functions_are_replaced_while_a_transaction_that_read_a_view_is_open(database_url: str) -> None:
    database = await Database.open(database_url)
    sql, other = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
    try:
        await install(database, "kafka", SETTINGS)
        await other.execute("drop view kafka.nodes; create view kafka.nodes as select 1 as node_id")
        async with sql.transaction():
            for view in ("topics", "partitions", "groups", "members", "lag", "transactions", "journal"):
                await sql.execute(f"select from kafka.{view}")
            await other.execute("update sluice.sql_door set digest = 'of another release'")
            async with asyncio.timeout(60):
                await install(database, "kafka", SETTINGS)
        # A view that has changed is replaced.
        await other.execute("select node_id, name from kafka.nodes")
        assert await other.fetch("select from pg_views where schemaname = 'kafka' and viewname like 'new%'") == []
    finally:
        await sql.close()
        await other.close()
        await database.close()


async def test_the_functions_apply_the_settings_of_the_node_that_started_last(database_url: str) -> None:
    database = await Database.open(database_url)
    sql = await asyncpg.connect(database_url)
    other = replace(
        SETTINGS, max_message_bytes=70, compacts=True, auto_create=False, authorizer=True, allow_if_no_acl=True,
        super_users=["User:admin"], log_append_time=True, timestamp_before_max_ms=1, timestamp_after_max_ms=2,
    )  # fmt: skip
    try:
        assert await install(database, "kafka", SETTINGS) is None
        assert await install(database, "kafka", SETTINGS) == SETTINGS
        await sql.execute("select kafka.produce('t', 'v', 'k')")
        assert await install(database, "kafka", other) == SETTINGS
        with pytest.raises(asyncpg.PostgresError):
            await sql.execute("select kafka.produce('t', 'v', 'k')")
        assert await install(database, "kafka", SETTINGS) == other
        await sql.execute("select kafka.produce('t', 'v', 'k')")
        assert sorted(changed_settings(SETTINGS, other)) == sorted(NAMES.values())
        assert changed_settings(SETTINGS, replace(SETTINGS, max_message_bytes=7)) == ["message.max.bytes"]
    finally:
        await sql.close()
        await database.close()
