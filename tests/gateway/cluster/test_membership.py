"""A node's own registration, and what the node does if another process takes its id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from gateway.cluster.membership import Membership
from gateway.cluster.placement import NO_LEADER
from storage.errors import StorageConflict, StorageUnavailable
from storage.nodes import NodeStore
from storage.pool import Database
from storage.queries import statement
from storage.types import BOTH, PartitionKey, Roles
from storage.types import Node as StoredNode

TTL_MS = 60_000


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(database_url, hot_connections=2, cold_connections=1)
    yield opened
    await opened.close()


class Node:
    def __init__(self, database: Database, port: int, number: int | None = None, roles: Roles = BOTH) -> None:
        listeners = {"PLAINTEXT": ("127.0.0.1", port)}
        self.membership = Membership(NodeStore(database), listeners, None, TTL_MS, number, roles)
        self.ended = 0
        self.membership.superseded = self._end

    def _end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("lives", [True, False])
async def test_node_with_a_fixed_number_ends_if_another_process_takes_it(
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


CONTROLLER, BROKER = Roles(is_broker=False), Roles(is_controller=False)


def _ids(nodes: list[StoredNode]) -> list[int]:
    return [int(node.node_id) for node in nodes]


async def test_brokers_lead_and_controllers_do_the_rest(database: Database) -> None:
    roles = (CONTROLLER, BROKER, BOTH)
    nodes = [Node(database, 9092 + number, roles=each) for number, each in enumerate(roles)]
    for node in nodes:
        await node.membership.join()
    for node in nodes:
        await node.membership.renew()
        membership = node.membership
        assert _ids(membership.alive()) == [1, 2, 3]
        assert _ids(membership.brokers()) == list(membership.broker_ids) == [2, 3]
        assert _ids(membership.controllers()) == list(membership.controller_ids) == [1, 3]
        assert {membership.leader_of(PartitionKey(key)).node_id for key in range(50)} == {2, 3}
        before = membership.leaders, membership.broker_ids, membership.controller_ids
        await membership.renew()
        after = membership.leaders, membership.broker_ids, membership.controller_ids
        assert all(one is other for one, other in zip(before, after, strict=True)), "nothing is worked out anew"


async def test_controller_that_joins_or_leaves_moves_no_leader(database: Database) -> None:
    broker, controller = Node(database, 9092), Node(database, 9093, roles=CONTROLLER)
    await broker.membership.join()
    leaders = broker.membership.leaders
    await controller.membership.join()
    await broker.membership.renew()
    assert _ids(broker.membership.alive()) == [1, 2]
    assert broker.membership.leaders is leaders
    await controller.membership.withdraw()
    await broker.membership.renew()
    assert broker.membership.leaders is leaders
    assert _ids(broker.membership.controllers()) == [1]


class LateAnswer(NodeStore):
    """Delays the answer to one read of the live nodes."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.delays = False
        self.has_read, self.may_answer = asyncio.Event(), asyncio.Event()

    async def alive(self) -> list[StoredNode]:
        delays, self.delays = self.delays, False
        found = await super().alive()
        if delays:
            self.has_read.set()
            await self.may_answer.wait()
        return found


async def test_late_answer_to_an_earlier_read_of_the_live_nodes_is_ignored(database: Database) -> None:
    store, other = LateAnswer(database), Node(database, 9093)
    membership = Membership(store, {"PLAINTEXT": ("127.0.0.1", 9092)}, None, TTL_MS)
    await membership.join()
    store.delays = True
    looking = asyncio.create_task(membership.look())
    await store.has_read.wait()
    await other.membership.join()
    await membership.finalize({"transaction.version": 1})
    store.may_answer.set()
    await looking
    assert membership.levels == {"transaction.version": 1}, "the node obeys the level since the call returned"
    assert _ids(membership.alive()) == [1, 2]
    assert membership.has_other_brokers


async def test_replaced_process_counts_as_gone_although_its_node_is_live(database: Database) -> None:
    """The node does not send the requests that it was about to send to the replaced process."""
    node, killed = Node(database, 9092), Node(database, 9093)
    for each in (node, killed):
        await each.membership.join()
    missing: list[bool] = []

    class Announcements:
        announced = 0

        def nodes_seen(self, alive: Any, gone: bool) -> None:
            missing.append(gone)

        def registered(self) -> None: ...

    node.membership.connect(Announcements())
    await node.membership.renew()
    again = Node(database, 9093)
    await again.membership.join()
    assert again.membership.node_id == killed.membership.node_id
    await node.membership.renew()
    await node.membership.renew()
    assert missing == [False, True, False]


@pytest.mark.parametrize("how", ["expired", "taken"])
async def test_node_reads_the_catalog_before_it_counts_itself_as_registered_again(database: Database, how: str) -> None:
    """Until then it serves no records from memory, because other nodes did not wait for it when they used the name of a
    deleted topic again."""
    node, other = Node(database, 9092), Node(database, 9092)
    await node.membership.join()
    if how == "expired":
        await database.control.fetch("update node set expires_at = clock_timestamp() - interval '1 second'")
    else:
        await other.membership.join()
    before_s, seen = node.membership.registered_until_s, list[float]()

    async def catch_up() -> None:
        seen.append(node.membership.registered_until_s)

    node.membership.connect(catch_up=catch_up)
    await node.membership.renew()
    assert seen == [before_s]
    assert node.membership.registered_until_s > before_s
    await node.membership.renew()
    assert len(seen) == 1


@pytest.mark.parametrize("how", ["expired", "taken"])
async def test_node_that_fails_to_read_the_catalog_reads_it_before_it_counts_itself_as_registered(
    database: Database, how: str
) -> None:
    """Its registration is valid from the first attempt on, so the next one does not see that it had expired."""
    node, other = Node(database, 9092), Node(database, 9092)
    await node.membership.join()
    if how == "expired":
        await database.control.fetch("update node set expires_at = clock_timestamp() - interval '1 second'")
    else:
        await other.membership.join()
    before_s, known_since_s = node.membership.registered_until_s, node.membership.known_since_s
    seen: list[float] = []

    async def catch_up() -> None:
        seen.append(node.membership.registered_until_s)
        if len(seen) == 1:
            raise StorageUnavailable("Postgres has no time")

    node.membership.connect(catch_up=catch_up)
    with pytest.raises(StorageUnavailable):
        await node.membership.renew()
    await node.membership.renew()
    assert seen == [before_s, before_s]
    assert node.membership.registered_until_s > before_s
    assert node.membership.known_since_s > known_since_s, "no announcement from before counts"
    await node.membership.renew()
    assert len(seen) == 2


async def test_node_on_a_machine_that_was_suspended_does_not_count_itself_as_registered(database: Database) -> None:
    """The event loop's clock stands still in the meantime, and Postgres elsewhere counts on."""
    asleep_s = 0.0
    node = Node(database, 9092)
    node.membership = Membership(
        NodeStore(database),
        {"PLAINTEXT": ("127.0.0.1", 9092)},
        None,
        TTL_MS,
        monotonic=lambda: asyncio.get_running_loop().time() + asleep_s,
    )
    assert not node.membership.is_registered
    await node.membership.join()
    assert node.membership.is_registered
    caught_up: list[bool] = []

    async def catch_up() -> None:
        caught_up.append(node.membership.is_registered)

    node.membership.connect(catch_up=catch_up)
    asleep_s = TTL_MS / 1000
    assert not node.membership.is_registered
    await node.membership.renew()
    assert node.membership.is_registered
    assert caught_up == [False], "an attempt whose answer was lost may have prolonged the registration in Postgres"


async def test_node_that_stops_being_a_broker_changes_the_serving_nodes(database: Database) -> None:
    node, other = Node(database, 9092), Node(database, 9093)
    for each in (node, other, node):
        await each.membership.join()
    assert node.membership.has_other_brokers
    before_s, leaders = node.membership.changed_s, node.membership.leaders
    await Node(database, 9093, roles=CONTROLLER).membership.join()
    await node.membership.renew()
    assert _ids(node.membership.alive()) == [1, 2]
    assert not node.membership.has_other_brokers
    assert node.membership.leaders is not leaders
    assert node.membership.changed_s > before_s


async def test_brokers_replace_missing_controllers_but_controllers_never_lead(database: Database) -> None:
    controller, broker = Node(database, 9092, roles=CONTROLLER), Node(database, 9093, roles=BROKER)
    await controller.membership.join()
    assert controller.membership.brokers() == []
    assert controller.membership.leaders.heaviest(7) == NO_LEADER
    await broker.membership.join()
    assert _ids(broker.membership.controllers()) == [1]
    await controller.membership.withdraw()
    await broker.membership.renew()
    assert _ids(broker.membership.controllers()) == list(broker.membership.controller_ids) == [2]


async def test_node_without_a_fixed_number_gets_another_number(database: Database) -> None:
    slept, other = Node(database, 9092), Node(database, 9093, 1)
    await slept.membership.join()
    await other.membership.join()
    await slept.membership.renew()
    assert (slept.membership.node_id, other.membership.node_id) == (2, 1)
    assert not slept.ended
