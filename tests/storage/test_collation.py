"""A database whose collation puts other names first than the stores' own columns do, which all compare bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from storage.groups import GroupStore
from storage.migrate import migrate
from storage.offsets import OffsetStore
from storage.pool import Database
from storage.types import CoordinatorLease, OffsetCommit
from tests.steps.waiting import until_blocked
from tests.storage.conftest import MakeTopic
from tests.storage.groups import group, save

LAST, FIRST = "a", "B"
"""Names of groups as bytes put them. People put them the other way round."""


@pytest.fixture
async def database_url(empty_database_url: str) -> AsyncIterator[str]:
    parts = urlsplit(empty_database_url)
    name = f"{parts.path.removeprefix('/')}_collated"
    connection = await asyncpg.connect(empty_database_url)
    try:
        try:
            await connection.execute(
                f"create database {name} template template0 encoding 'UTF8' locale 'C' "
                "locale_provider icu icu_locale 'en'"
            )
        except asyncpg.FeatureNotSupportedError as error:
            pytest.skip(str(error))
        url = urlunsplit(parts._replace(path=f"/{name}"))
        try:
            database = await Database.open(url)
            await migrate(database)
            await database.close()
            yield url
        finally:
            await connection.execute(f"drop database {name} with (force)")
    finally:
        await connection.close()


async def test_commits_lock_offsets_of_groups_in_the_order_in_which_a_transaction_ends_them(
    database: Database, sql: asyncpg.Connection, leases: list[CoordinatorLease], make_topic: MakeTopic
) -> None:
    """Otherwise the two could wait for each other."""
    offsets, topic = OffsetStore(database), await make_topic()
    for group_id in (LAST, FIRST):
        await save(GroupStore(database), group(group_id), leases[0])
    commits = [OffsetCommit(leases[0], each, 3, topic.topic_id, 0, 42, 7, "") for each in (LAST, FIRST)]
    assert await offsets.commit(commits) == [None, None]
    async with sql.transaction():
        assert await sql.fetchval("select 1 from committed_offset where group_id = $1 for update", LAST)
        blocked = asyncio.create_task(offsets.commit(commits))
        await until_blocked(sql)
        free = await sql.fetch(
            "select group_id from committed_offset where group_id = $1 for update skip locked", FIRST
        )
    assert await blocked == [None, None]
    assert not free
