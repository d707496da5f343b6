"""Leases and membership on a real Postgres: which node coordinates, until when, and which leases a restarted node
regains.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.cluster.clock import boot_time_s
from gateway.cluster.leases import SHARDS, Leases, shard_of
from gateway.cluster.membership import Membership
from gateway.cluster.reconciler import Reconciler
from gateway.config.broker_parsing import parse_broker_configs
from gateway.log.catalog import Catalog
from gateway.log.tail import Tail
from protocol.errors import ErrorCode, KafkaError
from storage.errors import StorageError, StorageUnavailable
from storage.nodes import NodeStore
from storage.pool import Database
from storage.topics import TopicStore
from storage.types import BOTH, CoordinatorLease, LeaseKind, NodeId, PartitionKey, Roles
from storage.types import Node as StoredNode
from tests.steps.waiting import turns

TTL_MS = 60_000


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = await Database.open(database_url, hot_connections=2, cold_connections=1)
    yield opened
    await opened.close()


class Node:
    """One process with its registration and its leases. The test moves its clock."""

    def __init__(self, database: Database, port: int = 9092, ttl_ms: int = TTL_MS, roles: Roles = BOTH) -> None:
        self.store = NodeStore(database)
        self.now = 1000.0
        self.membership = Membership(self.store, {"PLAINTEXT": ("127.0.0.1", port)}, None, ttl_ms, roles=roles)
        self.leases = Leases(self.store, self.membership, ttl_ms, monotonic=lambda: self.now)
        self.acquired: list[CoordinatorLease] = []
        self.lost: list[int] = []
        self.in_use = set(range(SHARDS))
        self.leases.listen(acquired=self.acquired.append, lost=self.lost.append, in_use=lambda: self.in_use)

    async def start(self) -> Node:
        await self.membership.join()
        await self.leases.renew()
        return self


@pytest.mark.parametrize(
    ("group_id", "shard"),
    [
        # Java: Math.abs("…".hashCode()) % 50. The last has the hash -2^31 ("polygenelubricants"), whose absolute value
        # counts as 0.
        ("", 0),
        ("a", 97 % 50),
        ("hello", 99162322 % 50),
        ("The quick brown fox jumps over the lazy dog", 609428141 % 50),
        ("\U0001f600", 1772899 % 50),
        ("polygenelubricants", 0),
    ],
)
def test_group_has_the_same_shard_as_upstream(group_id: str, shard: int) -> None:
    assert shard_of(group_id) == shard


def test_a_hash_costs_no_more_for_a_longer_id() -> None:
    began_s = time.process_time()
    for number in range(20):
        shard_of(f"{number}" + "g" * 8_000_000)
    assert time.process_time() - began_s < 2, "it took three seconds for each"


def test_hash_keeps_no_long_id() -> None:
    """A node looks for the coordinator of an id before it refuses the id, and remembers thousands of shards."""
    group_id = "g" * 8_000_000
    references = sys.getrefcount(group_id)
    shard_of(group_id)
    assert sys.getrefcount(group_id) == references


async def test_a_lone_node_coordinates_every_group(database: Database) -> None:
    node = await Node(database).start()
    assert node.leases.held == SHARDS == len(node.acquired)
    lease = node.leases.lease_for("group")
    assert lease is not None
    assert (lease.shard, lease.node_id) == (shard_of("group"), node.membership.node_id)
    assert node.leases.coordinator_of("group") == node.membership.self_node


async def test_a_node_that_is_only_a_controller_coordinates_nothing(database: Database) -> None:
    controller = await Node(database, 9092, roles=Roles(is_broker=False)).start()
    assert controller.leases.held == 0, "not even alone"
    with pytest.raises(KafkaError) as refused:
        controller.leases.coordinator_of("group")
    assert refused.value.code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    broker = await Node(database, 9093).start()
    assert broker.leases.held == SHARDS
    assert not await broker.leases.balance(), "there is nobody to share with"
    await controller.membership.renew()
    await controller.leases.renew()
    assert controller.leases.held == 0
    assert controller.leases.coordinator_of("group").node_id == broker.membership.node_id


async def test_a_lease_counts_from_when_its_renewal_was_sent(database: Database) -> None:
    node = await Node(database).start()
    node.now += TTL_MS / 1000 * 0.7
    assert node.leases.lease_for("group") is not None
    await node.leases.renew()
    node.now += TTL_MS / 1000 * 0.7
    assert node.leases.lease_for("group") is not None, "prolonged"
    assert node.lost == []
    node.now += TTL_MS / 1000 * 0.2
    assert node.leases.lease_for("group") is None, "given up before another node may take it"
    assert node.leases.held == 0
    with pytest.raises(KafkaError) as refused:
        node.leases.coordinator_of("group")
    assert refused.value.code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    await node.leases.renew()
    assert sorted(node.lost) == list(range(SHARDS)), "told before the leases are taken again"
    assert node.leases.held == SHARDS


@pytest.mark.parametrize("slow", ["acquire_leases", "renew_leases"])
async def test_time_until_postgres_answers_counts_as_held(
    database: Database, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    node = Node(database)
    call = getattr(node.store, slow)

    async def late(*arguments: Any, **named: Any) -> Any:
        answer = await call(*arguments, **named)
        node.now += TTL_MS / 1000 * 0.5
        return answer

    monkeypatch.setattr(node.store, slow, late)
    await node.start()
    if slow == "renew_leases":
        await node.leases.renew()
    assert node.leases.held == SHARDS
    node.now += TTL_MS / 1000 * 0.31
    assert node.leases.held == 0, "another node may soon acquire them"


async def test_leases_that_arrive_while_the_node_stops_are_released_unused(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(database)
    acquire = node.store.acquire_leases
    stopping: list[asyncio.Task[None]] = []

    async def late(*arguments: Any, **named: Any) -> Any:
        taken = await acquire(*arguments, **named)
        stopping.append(asyncio.create_task(node.leases.release()))
        await turns(2)
        return taken

    monkeypatch.setattr(node.store, "acquire_leases", late)
    await node.start()
    await asyncio.gather(*stopping)
    assert (node.acquired, node.leases.held) == ([], 0)
    await node.membership.withdraw()
    assert (await Node(database, 9093).start()).leases.held == SHARDS


async def test_killed_process_returns_at_once_with_its_id_and_higher_epochs(database: Database) -> None:
    killed = await Node(database).start()
    again = await Node(database).start()
    assert again.membership.node_id == killed.membership.node_id
    assert again.leases.held == SHARDS
    assert {lease.shard: lease.lease_epoch for lease in again.acquired} == {
        lease.shard: lease.lease_epoch + 1 for lease in killed.acquired
    }
    with pytest.raises(StorageError):
        await killed.store.renew(killed.membership.node_id, TTL_MS)
    assert await killed.store.renew_leases(killed.membership.node_id, killed.acquired, TTL_MS) == []


async def test_second_node_takes_free_shards_and_points_to_the_first(database: Database) -> None:
    first = await Node(database, 9092).start()
    second = await Node(database, 9093).start()
    assert second.leases.held == 0
    assert second.leases.lease_for("group") is None
    assert second.leases.coordinator_of("group") == first.membership.self_node
    assert [node.listeners["PLAINTEXT"][1] for node in second.membership.alive()] == [9092, 9093]

    await first.leases.release()
    assert sorted(first.lost) == list(range(SHARDS))
    await first.membership.withdraw()
    await second.membership.renew()
    await second.leases.renew()
    assert second.leases.held == SHARDS
    assert second.leases.coordinator_of("group") == second.membership.self_node
    assert [node.listeners["PLAINTEXT"][1] for node in second.membership.alive()] == [9093]
    assert {lease.lease_epoch for lease in second.acquired} == {first.acquired[0].lease_epoch + 1}


async def test_request_triggers_a_lease_pass_that_takes_released_shards(
    database: Database,
) -> None:
    first, second, third = [await Node(database, port).start() for port in (9092, 9093, 9094)]
    await first.leases.release()
    await first.membership.withdraw()
    groups = [f"group-{number}" for number in range(100)]
    await second.leases.look_up(groups)
    assert second.leases.held == SHARDS // 2
    await third.leases.look_up(groups)
    assert third.leases.held == SHARDS // 2
    await second.leases.look_up(groups)
    for group in groups:
        assert second.leases.coordinator_of(group) == third.leases.coordinator_of(group) != first.membership.self_node


async def _settle(*nodes: Node) -> None:
    """Run passes of all nodes until no lease is handed over any more."""
    for _ in range(3 * SHARDS):
        more = False
        for node in nodes:
            await node.membership.renew()
            await node.leases.renew()
            more = await node.leases.balance() or more
        if not more:
            break
    for node in nodes:
        await node.leases.renew()


async def test_shards_are_handed_over_one_by_one_until_every_node_has_its_share(database: Database) -> None:
    first, second = await Node(database, 9092).start(), await Node(database, 9093).start()
    await first.membership.renew()
    assert await first.leases.balance()
    assert (first.leases.held, first.leases.handed_over, len(first.lost)) == (SHARDS - 1, 1, 1)
    (moved,) = first.lost
    await second.leases.renew()
    assert [lease.shard for lease in second.acquired] == [moved]
    assert second.acquired[0].lease_epoch == 2

    third = await Node(database, 9094).start()
    await _settle(first, second, third)
    held = [node.leases.held for node in (first, second, third)]
    assert sorted(held) == [16, 17, 17]
    assert len({lease.shard for node in (first, second, third) for lease in node.leases.current()}) == SHARDS
    assert not await first.leases.balance()


async def test_shards_that_are_not_in_use_are_handed_over_together(database: Database) -> None:
    first, second = await Node(database, 9092).start(), await Node(database, 9093).start()
    await first.membership.renew()
    first.in_use = set(range(0, SHARDS, 2))
    wanted = {shard for shard, node_id in first.leases.wanted().items() if node_id == second.membership.node_id}
    assert await first.leases.balance()
    assert set(first.lost) == wanted - first.in_use
    assert first.leases.handed_over == len(first.lost) > 1
    await second.leases.renew()
    assert {lease.shard for lease in second.acquired} == set(first.lost)
    assert await first.leases.balance()
    assert len(wanted & first.in_use & set(first.lost)) == 1, "of the others one at a time"


async def test_clients_are_sent_to_the_next_owner_during_a_handover(database: Database) -> None:
    first, second = await Node(database, 9092).start(), await Node(database, 9093).start()
    await first.membership.renew()
    await first.leases.balance()
    (moved,) = first.lost
    group = next(name for name in map(str, range(10_000)) if shard_of(name) == moved)
    await first.leases.look_up([group])
    assert first.leases.lease_for(group) is None
    assert first.leases.coordinator_of(group) == second.membership.self_node
    await second.leases.renew()
    assert second.leases.lease_for(group) is not None


async def test_a_shard_with_a_rebalance_under_way_is_handed_over_last(database: Database) -> None:
    first, second = await Node(database, 9092, 600_000).start(), await Node(database, 9093, 600_000).start()
    await first.membership.renew()
    unrest = set(range(0, SHARDS, 2))
    first.leases.listen(in_unrest=lambda: unrest)
    for _ in range(SHARDS):
        assert await first.leases.balance()
        await second.leases.renew()
    assert not unrest & set(first.lost)
    assert 0 < second.leases.held < SHARDS // 2
    first.now += 61.0
    await first.leases.renew()
    await first.leases.balance()
    assert len(unrest & set(first.lost)) == 1, "one that never comes to rest is not waited for for ever"


async def test_stopped_node_leaves_each_shard_to_its_successor(database: Database) -> None:
    nodes = [await Node(database, port).start() for port in (9092, 9093, 9094)]
    await _settle(*nodes)
    first, second, third = nodes
    before = {node: {lease.shard for lease in node.leases.current()} for node in (second, third)}
    await first.leases.release()
    await first.membership.withdraw()
    await first.leases.renew()
    assert first.leases.held == 0, "it takes nothing back"
    for node in (second, third):
        await node.membership.renew()
        await node.leases.renew()
        assert before[node] <= {lease.shard for lease in node.leases.current()}
    assert second.leases.held == third.leases.held == SHARDS // 2


async def test_no_shard_is_handed_to_a_departed_node(database: Database) -> None:
    """The other node has read the list of live nodes just before the departure."""
    first, second = nodes = [await Node(database, port).start() for port in (9092, 9093)]
    await _settle(*nodes)
    handed_over = second.leases.handed_over
    await first.membership.withdraw()
    await first.leases.release()
    await second.leases.renew()
    assert second.leases.held == SHARDS
    assert set(second.leases.wanted().values()) == {node.membership.node_id for node in nodes}
    while await second.leases.balance():
        pass
    assert second.leases.held == SHARDS
    assert second.leases.handed_over == handed_over


async def test_a_killed_nodes_shards_are_shared_by_the_others(database: Database) -> None:
    killed = await Node(database, 9092, ttl_ms=3_000).start()
    second, third = [await Node(database, port).start() for port in (9093, 9094)]
    await _settle(killed, second, third)
    async with asyncio.timeout(60):
        while second.leases.held + third.leases.held < SHARDS:
            for node in (second, third):
                node.now += 0.05
                await node.membership.renew()
                await node.leases.renew()
            await asyncio.sleep(0.05)
    await _settle(second, third)
    assert second.leases.held == third.leases.held == SHARDS // 2


def test_leases_are_counted_on_a_clock_that_goes_on_while_the_machine_sleeps() -> None:
    assert abs(boot_time_s() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 5


async def test_concurrent_lookups_share_one_later_read(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = [await Node(database, port).start() for port in (9092, 9093)]
    looks = 0
    lease_owners = second.store.lease_owners

    async def counted(kind: LeaseKind) -> dict[int, StoredNode]:
        nonlocal looks
        looks += 1
        return await lease_owners()

    monkeypatch.setattr(second.store, "lease_owners", counted)
    await asyncio.gather(*(second.leases.look_up([f"group-{index}", "group"]) for index in range(100)))
    assert looks == 2, "the first one's own, and one for all who asked while that was under way"
    assert second.leases.coordinator_of("group") == first.membership.self_node
    await second.leases.look_up(["group"])
    assert looks == 3


async def test_concurrent_lookups_of_a_shard_without_owner_share_a_lease_pass(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients of a killed coordinator look for the next one at once. One pass for each would keep Postgres, and
    the clients, waiting for the last of them."""
    first, second = [await Node(database, port).start() for port in (9092, 9093)]
    await database.control.fetch("update coordinator_lease set expires_at = clock_timestamp()")
    passes = 0
    alive = second.store.alive

    async def counted() -> list[StoredNode]:
        nonlocal passes
        passes += 1
        return await alive()

    monkeypatch.setattr(second.store, "alive", counted)
    groups = [f"group-{index}" for index in range(100)]
    await asyncio.gather(*(second.leases.look_up(groups) for _ in range(100)))
    assert passes <= 2
    for group in groups:
        assert second.leases.coordinator_of(group) in (first.membership.self_node, second.membership.self_node)


async def test_lookup_that_is_cancelled_leaves_its_lease_pass_to_the_others(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = [await Node(database, port).start() for port in (9092, 9093)]
    await first.leases.release()
    await first.membership.withdraw()
    begun, go_on = asyncio.Event(), asyncio.Event()
    alive = second.store.alive

    async def slow() -> list[StoredNode]:
        begun.set()
        await go_on.wait()
        return await alive()

    monkeypatch.setattr(second.store, "alive", slow)
    gone, waiting = (asyncio.create_task(second.leases.look_up(["group"])) for _ in range(2))
    await begun.wait()
    gone.cancel()
    await asyncio.wait([gone])
    go_on.set()
    await waiting
    assert second.leases.coordinator_of("group") == second.membership.self_node


async def test_last_known_owners_are_named_without_postgres(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = [await Node(database, port).start() for port in (9092, 9093)]

    async def away(kind: LeaseKind) -> dict[int, StoredNode]:
        raise StorageUnavailable("away")

    monkeypatch.setattr(second.store, "lease_owners", away)
    await second.leases.look_up(["group"])
    assert second.leases.coordinator_of("group") == first.membership.self_node


async def test_lapsed_leases_are_reported_lost_while_postgres_is_away(database_url: str) -> None:
    """Otherwise JoinGroup requests of these groups would stay unanswered, and their clients would not look for the new
    coordinator."""
    database = await Database.open(database_url, hot_connections=1, cold_connections=1)
    node = await Node(database).start()
    reconciler = Reconciler(
        Catalog(TopicStore(database), Tail(0), parse_broker_configs({})),
        node.membership,
        node.leases,
        interval_ms=TTL_MS,
        ttl_ms=TTL_MS,
        observe_pass=lambda _trigger, _skipped, _seconds: None,
        observe_failure=lambda _cause: None,
    )
    await database.close()
    for passed_s, lost in ((0, []), (TTL_MS / 1000, list(range(SHARDS)))):
        node.now += passed_s
        reconciler.nodes_heard("")
        with pytest.raises(StorageUnavailable):
            await reconciler.keep_place()
        assert sorted(node.lost) == lost


async def test_request_renews_a_lapsed_lease(database: Database) -> None:
    node = await Node(database).start()
    node.now += TTL_MS / 1000 * 0.9
    await node.leases.look_up(["group"])
    assert node.leases.coordinator_of("group") == node.membership.self_node


async def test_node_that_lost_its_registration_joins_again(database: Database) -> None:
    node = await Node(database).start()
    await Node(database).start()
    await node.membership.renew()
    await node.leases.renew()
    assert sorted(node.lost) == list(range(SHARDS)), "what it held is not its own any more"
    assert node.leases.held == SHARDS


async def test_leaders_are_spread_over_the_live_nodes(database: Database) -> None:
    first = await Node(database, 9092).start()
    second = await Node(database, 9093).start()
    assert {second.membership.leader_of(PartitionKey(key)).node_id for key in range(10)} == {NodeId(1), NodeId(2)}
    await first.membership.renew()
    leaders = {first.membership.leader_of(PartitionKey(key)).node_id for key in range(10)}
    assert leaders == {NodeId(1), NodeId(2)}


async def test_withdrawn_node_is_not_registered_again_by_its_last_passes(database: Database) -> None:
    first, second = await Node(database, 9092).start(), await Node(database, 9093).start()
    await first.membership.withdraw()
    await first.membership.renew()
    await second.membership.renew()
    assert [node.node_id for node in second.membership.alive()] == [second.membership.node_id]


async def test_thread_may_count_leases_while_they_change(database: Database) -> None:
    """A separate thread collects the metrics."""
    node = await Node(database).start()
    enough = threading.Event()

    def count() -> int:
        counted = 0
        while not enough.is_set():
            assert node.leases.held <= SHARDS
            counted += 1
        return counted

    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    counting = asyncio.create_task(asyncio.to_thread(count))
    try:
        for _ in range(20):
            node.now += 1.1 * TTL_MS / 1000
            await node.leases.renew()
    finally:
        enough.set()
        sys.setswitchinterval(usual_s)
    assert await counting > 0
    assert node.leases.held == SHARDS
