"""Registrations and leases: Postgres gives the time, and the epoch gives authority."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from storage.errors import StorageConflict
from storage.nodes import NodeStore, Unregistered
from storage.notify import Listener
from storage.pool import Database
from storage.types import BOTH, CoordinatorLease, LeaseKind, Node, NodeId, Roles
from tests.steps.waiting import until

TTL_MS = 60_000
LAPSE_NODE = "update node set expires_at = clock_timestamp() where node_id = $1"
STAND_FOR_NODE = "select pg_advisory_lock_shared(771903214, $1::integer)"
LAPSE_LEASES = "update coordinator_lease set expires_at = clock_timestamp() where shard = any ($1)"


@pytest.fixture
def nodes(database: Database) -> NodeStore:
    return NodeStore(database)


@pytest.fixture
def others(database: Database) -> NodeStore:
    """The store of another process."""
    return NodeStore(database)


async def register(store: NodeStore, port: int) -> NodeId:
    return await store.register(f"host:{port}", at(port), None, TTL_MS)


def at(port: int, host: str = "host") -> dict[str, tuple[str, int]]:
    return {"PLAINTEXT": (host, port)}


def epochs(leases: list[CoordinatorLease]) -> dict[int, int]:
    return {lease.shard: lease.lease_epoch for lease in leases}


async def test_a_configured_id_is_reserved_for_its_node(
    nodes: NodeStore, others: NodeStore, sql: asyncpg.Connection
) -> None:
    given = await nodes.register("host:1", at(1), None, TTL_MS, 1)
    await nodes.withdraw(given)
    assert await register(others, 2) == 2, "nobody else is numbered so while it is down"
    assert await nodes.register("host:1", at(1), None, TTL_MS, 1) == given
    await nodes.withdraw(given)
    assert await others.unregister(given) is Unregistered.DONE
    assert await register(others, 3) == given, "whoever was unregistered is not waited for"
    await others.withdraw(given)
    assert await register(others, 4) == given, "a number that was not given by settings is anybody's"


async def test_a_node_gets_the_lowest_free_id_from_one(nodes: NodeStore, sql: asyncpg.Connection) -> None:
    assert [await register(nodes, port) for port in (1, 2, 3)] == [1, 2, 3]
    await sql.execute(LAPSE_NODE, 2)
    assert await nodes.register("host:4", at(4), "rack-a", TTL_MS) == 2
    assert await register(nodes, 5) == 4
    assert await nodes.alive() == [
        Node(NodeId(1), at(1)),
        Node(NodeId(2), at(4), "rack-a"),
        Node(NodeId(3), at(3)),
        Node(NodeId(4), at(5)),
    ]


async def test_processes_that_start_together_get_different_ids(nodes: NodeStore) -> None:
    ids = await asyncio.gather(*(register(nodes, port) for port in range(8)))
    assert sorted(ids) == list(range(1, 9))


async def test_a_process_that_returns_gets_its_id_back(nodes: NodeStore, others: NodeStore) -> None:
    await register(nodes, 1)
    node_id = await register(nodes, 2)
    assert await register(others, 2) == node_id
    with pytest.raises(StorageConflict):
        await nodes.renew(node_id, TTL_MS)
    await others.renew(node_id, TTL_MS)


async def test_a_node_with_a_new_address_keeps_its_name(nodes: NodeStore, others: NodeStore) -> None:
    node_id = await nodes.register("gateway-a", at(1, "old"), None, TTL_MS)
    assert await others.register("gateway-a", at(2, "new"), None, TTL_MS) == node_id
    assert await nodes.alive() == [Node(node_id, at(2, "new"))]


async def test_each_listener_has_an_address_of_its_own(nodes: NodeStore, others: NodeStore) -> None:
    listeners = {"OUTSIDE": ("kafka.example.org", 9094), "INTERNAL": ("::1", 9092)}
    node_id = await nodes.register("gateway-a", listeners, "rack-a", TTL_MS)
    assert await others.alive() == [Node(node_id, listeners, "rack-a")]


async def test_other_nodes_read_what_a_node_registered(
    nodes: NodeStore, others: NodeStore, sql: asyncpg.Connection
) -> None:
    controller = Roles(is_broker=False, controller_listeners=("CONTROLLER",))
    broker = Roles(is_controller=False)
    for port, roles in ((1, controller), (2, broker)):
        await nodes.register(f"host:{port}", at(port), None, TTL_MS, roles=roles)
    await register(nodes, 3)
    read = [controller, broker, BOTH]
    assert [node.roles for node in await others.alive()] == read
    assert [report.node.roles for report in await others.reports()] == read
    log = await others.metadata_log(LeaseKind.JOBS, 0)
    assert [follower.node.roles for follower in log.followers] == read
    await sql.execute("update sluice.node set expires_at = '-infinity'")
    assert [node.node_id for node in await others.fenced()] == [2, 3], "a controller is no broker that could be fenced"


async def test_a_node_that_is_not_renewed_is_not_alive(nodes: NodeStore, sql: asyncpg.Connection) -> None:
    node_id = await register(nodes, 1)
    await sql.execute(LAPSE_NODE, node_id)
    assert await nodes.alive() == []
    await nodes.renew(node_id, TTL_MS)
    assert await nodes.alive() == [Node(node_id, at(1))]
    await nodes.withdraw(node_id)
    assert await nodes.alive() == []


async def test_a_withdrawal_does_not_end_the_registration_of_another_process(
    nodes: NodeStore, others: NodeStore
) -> None:
    node_id = await register(nodes, 1)
    await register(others, 1)
    await nodes.withdraw(node_id)
    assert [node.node_id for node in await nodes.alive()] == [node_id]


async def test_an_unregistered_node_frees_its_name_and_id(
    nodes: NodeStore, others: NodeStore, sql: asyncpg.Connection
) -> None:
    assert await others.unregister(NodeId(1)) is Unregistered.UNKNOWN
    one, two = await register(nodes, 1), await register(nodes, 2)
    assert await others.unregister(one) is Unregistered.ALIVE
    assert [node.node_id for node in await nodes.alive()] == [one, two]
    await nodes.withdraw(one)
    await sql.execute(LAPSE_NODE, two)
    assert await others.unregister(one) is Unregistered.DONE
    assert await others.unregister(two) is Unregistered.DONE
    assert await others.unregister(two) is Unregistered.UNKNOWN
    assert await register(others, 2) == one, "its name has no id any more, so it takes the lowest"
    assert await others.alive() == [Node(one, at(2))]


async def test_a_process_that_slept_through_its_unregistration_is_fenced(
    nodes: NodeStore, others: NodeStore, sql: asyncpg.Connection
) -> None:
    slept = await register(nodes, 1)
    await sql.execute(LAPSE_NODE, slept)
    await others.unregister(slept)
    assert await register(others, 2) == slept, "another process has its id now"
    with pytest.raises(StorageConflict):
        await nodes.renew(slept, TTL_MS)
    assert await nodes.acquire_leases(slept, [0], TTL_MS) == []


async def test_an_id_that_was_not_registered_here_is_refused(nodes: NodeStore) -> None:
    with pytest.raises(StorageConflict):
        await nodes.renew(NodeId(1), TTL_MS)
    with pytest.raises(StorageConflict):
        await nodes.acquire_leases(NodeId(1), [0], TTL_MS)


async def test_a_lease_is_acquired_if_free_and_refused_if_held(nodes: NodeStore, others: NodeStore) -> None:
    one, two = (
        await register(nodes, 1),
        await register(others, 2),
    )
    assert epochs(await nodes.acquire_leases(one, [3, 1, 1], TTL_MS)) == {1: 1, 3: 1}
    assert epochs(await others.acquire_leases(two, [1, 2, 3], TTL_MS)) == {2: 1}
    assert await others.lease_owners() == {
        1: Node(one, at(1), None),
        2: Node(two, at(2), None),
        3: Node(one, at(1), None),
    }


async def test_acquiring_a_lease_again_keeps_its_epoch(nodes: NodeStore, sql: asyncpg.Connection) -> None:
    node_id = await register(nodes, 1)
    await nodes.acquire_leases(node_id, [1], TTL_MS)
    assert epochs(await nodes.acquire_leases(node_id, [1], TTL_MS)) == {1: 1}
    await sql.execute(LAPSE_LEASES, [1])
    assert epochs(await nodes.acquire_leases(node_id, [1], TTL_MS)) == {1: 1}, "nobody had it in between"


async def test_the_epoch_rises_with_the_owner_and_with_the_process(
    nodes: NodeStore, others: NodeStore, database: Database, sql: asyncpg.Connection
) -> None:
    one, two = (
        await register(nodes, 1),
        await register(others, 2),
    )
    held = await nodes.acquire_leases(one, [1], TTL_MS)
    await sql.execute(LAPSE_LEASES, [1])
    assert epochs(await others.acquire_leases(two, [1], TTL_MS)) == {1: 2}
    assert await nodes.renew_leases(one, held, TTL_MS) == []

    restarted = NodeStore(database)
    assert await register(restarted, 2) == two
    assert epochs(await restarted.acquire_leases(two, [1], TTL_MS)) == {1: 3}, "own at once, though not run out"
    assert await others.acquire_leases(two, [1], TTL_MS) == [], "the process before has no say any more"


async def test_a_renewal_returns_the_leases_still_held(
    nodes: NodeStore, others: NodeStore, sql: asyncpg.Connection
) -> None:
    one, two = (
        await register(nodes, 1),
        await register(others, 2),
    )
    held = await nodes.acquire_leases(one, [1, 2, 3], TTL_MS)
    await sql.execute(LAPSE_LEASES, [1, 2, 3])
    await others.acquire_leases(two, [2], TTL_MS)
    assert epochs(await nodes.renew_leases(one, held, TTL_MS)) == {1: 1, 3: 1}
    assert await others.acquire_leases(two, [1, 3], TTL_MS) == [], "renewed"


async def test_released_leases_are_free_at_once(nodes: NodeStore, others: NodeStore) -> None:
    one, two = (
        await register(nodes, 1),
        await register(others, 2),
    )
    await nodes.acquire_leases(one, [1, 2], TTL_MS)
    await nodes.release_leases(one, {1: None, 2: None})
    assert await nodes.lease_owners() == {}
    assert epochs(await others.acquire_leases(two, [1, 2], TTL_MS)) == {1: 2, 2: 2}


async def test_a_shard_has_one_owner_if_many_nodes_try(database: Database) -> None:
    stores = [NodeStore(database) for _ in range(4)]
    ids = [await register(store, port) for port, store in enumerate(stores)]
    shards = list(range(20))
    taken = await asyncio.gather(
        *(store.acquire_leases(node_id, shards, TTL_MS) for store, node_id in zip(stores, ids, strict=True))
    )
    assert sorted(lease.shard for leases in taken for lease in leases) == shards


async def test_a_lease_that_was_handed_over_is_reserved_for_its_successor_for_a_while(
    nodes: NodeStore, others: NodeStore
) -> None:
    one, two, three = await register(nodes, 1), await register(others, 2), await register(others, 3)
    (before,) = await nodes.acquire_leases(one, [1], TTL_MS)
    await nodes.release_leases(one, {1: two})
    for store, node in ((nodes, one), (others, three)):
        assert await store.acquire_leases(node, [1], TTL_MS, grace_ms=TTL_MS) == []
        assert await store.acquire_leases(node, [], TTL_MS, spare=[1], grace_ms=TTL_MS) == []
    (after,) = await others.acquire_leases(two, [1], TTL_MS, grace_ms=TTL_MS)
    assert (after.node_id, after.lease_epoch) == (two, before.lease_epoch + 1)
    assert await nodes.renew_leases(one, [before], TTL_MS) == []

    await others.release_leases(two, {1: one})
    (taken,) = await others.acquire_leases(three, [], TTL_MS, spare=[1], grace_ms=0)
    assert taken.node_id == three, "its successor has not come"


async def test_a_lease_meant_for_another_node_is_acquired_if_it_stays_free_for_a_while(
    nodes: NodeStore, others: NodeStore
) -> None:
    one, two = await register(nodes, 1), await register(others, 2)
    await nodes.acquire_leases(one, [1, 2], TTL_MS)
    await nodes.release_leases(one, {1: None, 2: None})
    taken = await others.acquire_leases(two, [1], TTL_MS, spare=[2], grace_ms=TTL_MS)
    assert [lease.shard for lease in taken] == [1]
    taken = await others.acquire_leases(two, [], TTL_MS, spare=[2], grace_ms=0)
    assert [lease.shard for lease in taken] == [2]


async def test_a_renewal_reports_that_the_registration_had_expired(nodes: NodeStore) -> None:
    one = await register(nodes, 1)
    assert not await nodes.renew(one, TTL_MS)
    assert await nodes.renew(one, 0) is False
    assert await nodes.renew(one, TTL_MS)
    assert not await nodes.renew(one, TTL_MS)


async def test_a_renewal_concurrent_with_the_withdrawal_does_not_register_again(nodes: NodeStore) -> None:
    one = await register(nodes, 1)
    await nodes.withdraw(one)
    with pytest.raises(StorageConflict):
        await nodes.renew(one, TTL_MS)
    assert await nodes.alive() == []


async def test_a_requested_id_is_given_unless_another_process_holds_it(
    nodes: NodeStore, others: NodeStore, sql: asyncpg.Connection
) -> None:
    one = await register(nodes, 1)
    assert await nodes.register("host:1", at(1), None, TTL_MS, 0) == 0, "its name has another id from now on"
    assert await nodes.alive() == [Node(NodeId(0), at(1))]
    with pytest.raises(StorageConflict):
        await nodes.renew(one, TTL_MS)
    assert await others.register("host:1", at(1), None, TTL_MS, 0) == 0
    with pytest.raises(StorageConflict):
        await nodes.renew(NodeId(0), TTL_MS)
    # A running process keeps its id. A process that ended without withdrawing does not.
    await sql.execute(STAND_FOR_NODE, 0)
    with pytest.raises(StorageConflict, match=r"node\.id 0"):
        await nodes.register("host:2", at(2), None, TTL_MS, 0)
    assert [node.node_id for node in await others.rivals("host:2", at(2), 0)] == [0]
    assert await others.rivals("host:2", at(2), 1) == []
    assert await nodes.register("host:2", at(2), None, TTL_MS) == 1
    await sql.execute("select pg_advisory_unlock_all()")
    assert await nodes.register("host:3", at(3), None, TTL_MS, 0) == 0
    with pytest.raises(StorageConflict):
        await others.renew(NodeId(0), TTL_MS)
    assert await nodes.alive() == [Node(NodeId(0), at(3)), Node(NodeId(1), at(2))]


CLOCK_SET_BACK = """
update node set expires_at = expires_at + interval '1 hour', registered_at = registered_at + interval '1 hour',
    renewed_at = renewed_at + interval '1 hour';
update coordinator_lease set expires_at = expires_at + interval '1 hour' where isfinite(expires_at);
"""
"""Change the rows as if the clock had been set back by an hour."""
LASTS = """
select node_id, max(round(extract(epoch from expires_at - clock_timestamp()) / 10) * 10)::integer as seconds
from {} group by node_id order by node_id
"""
"""Remaining seconds of registrations and leases, by node, rounded."""


@pytest.mark.parametrize("renewed", [False, True])
async def test_a_dead_node_expires_in_time_although_the_clock_was_set_back(
    nodes: NodeStore, others: NodeStore, sql: asyncpg.Connection, renewed: bool
) -> None:
    dead, alive = await nodes.register("host:1", at(1), None, 300_000), await register(others, 2)
    if renewed:
        await nodes.renew(dead, 300_000)
    await nodes.acquire_leases(dead, [0, 1], 300_000)
    await sql.execute(CLOCK_SET_BACK)
    assert not await others.renew(alive, TTL_MS)
    assert [tuple(row) for row in await sql.fetch(LASTS.format("node"))] == [(dead, 300), (alive, 60)]
    assert [tuple(row) for row in await sql.fetch(LASTS.format("coordinator_lease"))] == [(dead, 300)]
    assert {report.node.node_id for report in await others.reports()} == {dead, alive}
    assert all(report.registered_ms_ago >= 0 for report in await others.reports())


async def test_no_registration_is_shortened_while_the_clock_advances(
    nodes: NodeStore, others: NodeStore, sql: asyncpg.Connection
) -> None:
    """The other node's period is longer than the one of the node that looks. Its withdrawal also withdrew its
    leases."""
    patient, hasty = (
        await nodes.register("host:1", at(1), None, 600_000),
        await others.register("host:2", at(2), None, 20_000),
    )
    await nodes.acquire_leases(patient, [0], 600_000)
    await others.renew(hasty, 20_000)
    assert [tuple(row) for row in await sql.fetch(LASTS.format("node"))] == [(patient, 600), (hasty, 20)]
    assert [tuple(row) for row in await sql.fetch(LASTS.format("coordinator_lease"))] == [(patient, 600)]
    await nodes.withdraw(patient)
    await others.renew(hasty, 20_000)
    assert [node.node_id for node in await others.alive()] == [hasty]


async def test_session_stands_for_the_id_that_the_node_has_now(
    nodes: NodeStore, others: NodeStore, database: Database
) -> None:
    """Another process has taken the node's former id. If that process is killed, its successor must find no rival."""
    ids = [await register(nodes, 1)]
    listener = Listener(database, {}, lambda: ids[-1])

    async def listen() -> None:
        while True:
            await listener.listen(lambda: None, lambda: None)

    listening = asyncio.create_task(listen())
    try:
        await until(lambda: others.rivals("host:1", at(1)), "the session stands for the first id")
        ids.append(await register(nodes, 2))
        await until(lambda: others.rivals("host:2", at(2)), "the session stands for the second id")
        await until(lambda: others.rivals("host:1", at(1)), "no session stands for it", holds=lambda found: not found)
    finally:
        listening.cancel()
        await asyncio.wait((listening,))
