"""Lookups of users in Postgres. Many requests for unknown users may delay only some clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from gateway.security.authenticator import ABSENT_S, MAX_LOOKUPS, Users
from gateway.security.scram import MECHANISMS
from storage.pool import SESSION_SETTINGS, Database
from storage.users import UserStore

SCRAM = MECHANISMS["SCRAM-SHA-256"]
ADDRESS = "/10.0.0.1"
ADD = "insert into scram_credential values ($1, $2, 4096, 'salt', 'stored', 'server')"


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(database_url, hot_connections=4, cold_connections=1)
    yield opened
    await opened.close()


@pytest.fixture
async def sql(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url, server_settings=dict(SESSION_SETTINGS))
    yield connection
    await connection.close()


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_known_absent_name_does_not_wait_for_lookups(database: Database, sql: asyncpg.Connection) -> None:
    clock = Clock()
    users = Users(UserStore(database), clock=clock)
    decoy = await users.find("mallory", SCRAM, ADDRESS)
    holding = sql.transaction()
    await holding.start()
    await sql.execute("lock table scram_credential in access exclusive mode")
    strangers = [asyncio.create_task(users.find(f"stranger {n}", SCRAM, ADDRESS)) for n in range(MAX_LOOKUPS + 1)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(users.find("mallory", SCRAM, ADDRESS), 2) == decoy
    clock.now_s += ABSENT_S
    late = asyncio.create_task(users.find("mallory", SCRAM, ADDRESS))
    done, _ = await asyncio.wait([late], timeout=0.2)
    assert not done
    await holding.rollback()
    await asyncio.gather(late, *strangers)


async def test_new_user_is_known_at_once_without_a_queue(database: Database, sql: asyncpg.Connection) -> None:
    users = Users(UserStore(database), clock=Clock())
    assert (await users.find("carol", SCRAM, ADDRESS)).stored_key != b"stored"
    await sql.execute(ADD, "carol", int(SCRAM))
    assert (await users.find("carol", SCRAM, ADDRESS)).stored_key == b"stored"


async def test_user_of_another_address_waits_for_one_unknown_user(database: Database, sql: asyncpg.Connection) -> None:
    await sql.execute(ADD, "bob", int(SCRAM))
    users = Users(UserStore(database))
    over: list[str] = []

    async def find(name: str, address: str) -> None:
        await users.find(name, SCRAM, address)
        over.append(name)

    strangers = [asyncio.create_task(find(f"stranger {n}", ADDRESS)) for n in range(300)]
    await asyncio.sleep(0)
    await find("bob", "/10.0.0.2")
    assert over.index("bob") <= 3 * MAX_LOOKUPS
    await asyncio.gather(*strangers)
