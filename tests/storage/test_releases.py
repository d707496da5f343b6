"""SQL functions of a release: kept while a node may call them, dropped when no node has done so for long."""

from __future__ import annotations

import asyncpg

from storage.nodes import NodeStore
from storage.pool import Database
from storage.releases import drop_unused_functions
from storage.schema import FUNCTION_SCHEMA

FORMER, OTHER = "sluice_0123456789ab", "sluice_ba9876543210"
HOUR_MS = 3_600_000
AGE = "update function_schema set used_at = used_at - interval '2 hours'"


async def schemas(sql: asyncpg.Connection) -> set[str]:
    rows = await sql.fetch("select nspname::text from pg_namespace where nspname like 'sluice\\_%'")
    return {row["nspname"] for row in rows}


async def make(sql: asyncpg.Connection, *names: str) -> None:
    for name in names:
        await sql.execute(f"drop schema if exists {name} cascade; create schema {name}")
        await sql.execute(f"create function {name}.probe() returns integer language sql as 'select 1'")
        await sql.execute("insert into function_schema (name) values ($1)", name)


async def register(store: NodeStore, port: int) -> int:
    return await store.register(f"host:{port}", {"PLAINTEXT": ("host", port)}, None, 60_000)


async def test_functions_that_no_node_has_called_for_long_are_dropped(
    database: Database, sql: asyncpg.Connection
) -> None:
    await make(sql, FORMER, "sluice_not_a_release")
    assert await drop_unused_functions(database, grace_ms=HOUR_MS) == [], "used recently"
    await sql.execute(AGE)
    assert await drop_unused_functions(database, grace_ms=HOUR_MS) == [FORMER]
    assert await schemas(sql) == {FUNCTION_SCHEMA, "sluice_not_a_release"}
    await sql.execute(AGE)
    assert await drop_unused_functions(database, grace_ms=HOUR_MS) == [], "its own are in use"
    await sql.execute("drop schema sluice_not_a_release cascade")


async def test_functions_of_a_live_node_stay_and_those_of_a_dead_one_are_dropped(
    database: Database, sql: asyncpg.Connection
) -> None:
    await make(sql, FORMER, OTHER)
    store = NodeStore(database)
    live, dead = await register(store, 1), await register(store, 2)
    for node_id, name in ((live, FORMER), (dead, OTHER)):
        await sql.execute("update node set function_schema = $2 where node_id = $1", node_id, name)
    await sql.execute("update node set expires_at = now() where node_id = $1", dead)
    assert await drop_unused_functions(database, grace_ms=HOUR_MS) == []
    await sql.execute(AGE)
    assert await drop_unused_functions(database, grace_ms=HOUR_MS) == [OTHER]
    assert await schemas(sql) == {FUNCTION_SCHEMA, FORMER}
