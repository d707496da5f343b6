"""A node's own registration: what it does when another process has its number."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from gateway.cluster.membership import Membership
from storage.errors import StorageConflict
from storage.nodes import NodeStore
from storage.pool import Database
from storage.queries import statement

TTL_MS = 60_000


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(database_url, hot_connections=2, cold_connections=1)
    yield opened
    await opened.close()


class Node:
    def __init__(self, database: Database, port: int, number: int | None = None) -> None:
        self.membership = Membership(NodeStore(database), {"PLAINTEXT": ("127.0.0.1", port)}, None, TTL_MS, number)
        self.ended = 0
        self.membership.superseded = self._end

    def _end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("lives", [True, False])
async def test_a_node_that_may_have_no_other_number_ends_when_another_process_has_it(
    database: Database, database_url: str, *, lives: bool
) -> None:
    slept, other = Node(database, 9092, 1), Node(database, 9093, 1)
    await slept.membership.join()
    await other.membership.join()
    if lives:
        session = await asyncpg.connect(database_url, server_settings={"search_path": "sluice"})
        await session.fetch(statement("stand_for_node"), 1)
        with pytest.raises(StorageConflict):
            await slept.membership.renew()
        await session.close()
    else:
        await slept.membership.renew()
    assert slept.ended == lives
    assert not other.ended


async def test_a_node_that_is_numbered_gets_another_number(database: Database) -> None:
    slept, other = Node(database, 9092), Node(database, 9093, 1)
    await slept.membership.join()
    await other.membership.join()
    await slept.membership.renew()
    assert (slept.membership.node_id, other.membership.node_id) == (2, 1)
    assert not slept.ended
