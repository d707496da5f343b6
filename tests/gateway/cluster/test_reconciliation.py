"""A node's state follows the committed catalog: in single steps, and on a real Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast
from uuid import UUID

import pytest
import structlog.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.cluster.placement import Leaders
from gateway.cluster.reconciler import Reconciler
from gateway.cluster.wake import TICK, Wake
from gateway.config.broker import BrokerConfig
from gateway.log.catalog import Catalog
from gateway.log.catalog_changes import (
    ConfirmRemove,
    InstallOwned,
    InstallRouted,
    RemoveRouted,
    decide,
    decide_confirmed,
    decide_owned,
)
from gateway.log.tail import Tail
from protocol.errors import ErrorCode
from storage.errors import StorageUnavailable
from storage.types import CatalogChanges, Partition, PartitionKey, Topic
from tests.gateway.data_plane import DataPlane, batch_of, data_plane

# --- values -----------------------------------------------------------------------------------------------------------


def topic(number: int, revision: int = 1, partitions: int = 1) -> Topic:
    """Return a topic for the number. The numbers 1, 4 and 7 are successive topics with the same name."""
    return Topic(
        UUID(int=number),
        f"t{number % 3}",
        False,
        {},
        tuple(
            Partition(index, PartitionKey(100 * number + index), 0, None, UUID(int=number), partitions)
            for index in range(partitions)
        ),
        number,
        revision,
    )


def committed(revision: int, *topics: Topic, whole: bool = True, deleted: tuple[UUID, ...] = ()) -> CatalogChanges:
    return CatalogChanges(revision, whole, topics, deleted, None, None)


def catalog_of(*topics: Topic) -> Catalog:
    catalog = Catalog(cast("Any", None), Tail(1024), BrokerConfig())
    for each in topics:
        assert catalog.apply(each)
    return catalog


states = st.lists(st.builds(topic, st.integers(1, 9), st.integers(1, 20), st.integers(1, 5)), max_size=9)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
@given(states, states, st.sets(st.integers(1, 4), min_size=1), st.integers(1, 4))
def test_operations_converge_to_the_committed_state(
    read: list[Topic], drawn: list[Topic], node_ids: set[int], own_id: int
) -> None:
    catalog = catalog_of()
    for each in read:
        catalog.apply(each)
    # At most one topic of a name is live. No earlier topic of the name follows a later one, and none returns to an
    # earlier state.
    live = {each.name: each for each in sorted([*read, *drawn], key=lambda each: each.created_revision)}
    rows = [
        topic(int(each.topic_id), 21, len(each.partitions))
        for each in live.values()
        if each in drawn
        and each.created_revision >= max([0, *(r.created_revision for r in read if r.name == each.name)])
    ]
    leaders = Leaders(node_ids)
    changes = committed(100, *rows)

    operations = list(decide(catalog.held, changes))
    assert {each.topic_id for each in operations if isinstance(each, RemoveRouted)} == set(catalog.held) - {
        each.topic_id for each in rows
    }
    for operation in [*operations, *operations]:
        catalog.perform(operation)
    assert {topic_id: held.topic for topic_id, held in catalog.held.items()} == {each.topic_id: each for each in rows}
    assert all(catalog.get(each.name) == each for each in rows)
    assert list(decide(catalog.held, changes)) == []

    for held in list(catalog.held.values()):
        operation = decide_owned(held, lambda part: leaders.leader(part) == own_id)
        if operation is not None:
            catalog.perform(operation)
            catalog.perform(operation)
    assert all(
        decide_owned(held, lambda part: leaders.leader(part) == own_id) is None for held in catalog.held.values()
    )
    assert catalog.owned == sum(
        leaders.leader(part) == own_id for held in catalog.held.values() for part in held.topic.partitions
    )

    for confirm in decide_confirmed(catalog.removed_ids, ()):
        catalog.perform(confirm)
    assert (catalog.deferred, list(decide_confirmed(catalog.removed_ids, ()))) == (0, [])


def test_later_incarnation_replaces_the_earlier() -> None:
    catalog = catalog_of(topic(1), topic(4))
    assert set(catalog.held) == {topic(4).topic_id}
    assert catalog.removed_ids == [topic(1).topic_id]
    assert not catalog.apply(topic(1, revision=30)), "it does not come back"


def test_an_operation_that_has_been_overtaken_is_discarded() -> None:
    old, new = topic(1, 1), topic(1, 2, partitions=3)
    catalog = catalog_of(old)
    (held,) = catalog.held.values()
    staged = decide_owned(held, lambda key: True)
    assert staged is not None
    assert staged == InstallOwned(old, frozenset({0}))
    catalog.perform(InstallRouted(new))
    for late in (staged, InstallRouted(old), ConfirmRemove(old.topic_id), RemoveRouted(UUID(int=9))):
        catalog.perform(late)
    assert catalog.get("t1") is new
    assert catalog.owned == 0
    assert catalog.performed["discarded"] == 4


def test_joining_node_takes_partitions_and_leaving_node_returns_them() -> None:
    catalog = catalog_of(topic(1, partitions=60))
    for node_ids in ([1], [1, 2], [1, 2, 3], [1]):
        leaders = Leaders(node_ids)
        (held,) = catalog.held.values()
        operation = decide_owned(held, lambda part, leaders=leaders: leaders.leader(part) == 1)
        assert operation is not None
        catalog.perform(operation)
        assert abs(catalog.owned - 60 / len(node_ids)) <= 12


# --- what must hold from the start ------------------------------------------------------------------------------------


@pytest.fixture
async def node(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url) as node:
        yield node


@pytest.fixture
async def other(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url, name="node-2") as other:
        yield other


class Leases:
    """Leases of a node that keeps all of them."""

    held = 0

    async def renew(self) -> None:
        pass

    async def balance(self) -> bool:
        return False


class Passes:
    """A reconciler on a node, with a record of its passes."""

    def __init__(self, node: DataPlane, interval_ms: int = 60_000) -> None:
        self.seen: list[tuple[str, bool]] = []
        self.failures: list[str] = []
        self.reconciler = Reconciler(
            node.catalog,
            node.membership,
            cast("Any", Leases()),
            interval_ms=interval_ms,
            ttl_ms=5_000,
            observe_pass=lambda trigger, skipped, seconds: self.seen.append((trigger, skipped)),
            observe_failure=self.failures.append,
        )

    async def run(self, trigger: str = "test") -> bool:
        """Run one pass; return whether there was nothing to do."""
        self.reconciler.metadata_wake(trigger)
        await self.reconciler.converge()
        return self.seen[-1][1]


async def test_1_a_removal_that_must_wait_counts_as_work_until_it_is_confirmed(
    node: DataPlane, other: DataPlane
) -> None:
    topic, under_way = await node.create_topic("t"), True
    await node.fill(topic, [300])
    node.settled = lambda key: lambda: not under_way
    passes = Passes(node)
    await passes.run()
    assert await passes.run(), "nothing is left over"
    await other.catalog.refresh_if_changed()
    await other.delete_topic(topic)
    assert not await passes.run()
    assert not await passes.run(), "nothing new, but something left over"
    # The append that was under way completes after the topic's removal.
    key = topic.partitions[0].partition_key
    node.tail.record_append(
        key, base_offset=1, last_offset=1, records=b"x", log_start_offset=0, leader_epoch=0, now_s=1.0
    )
    under_way = False
    assert not await passes.run()
    assert node.tail.known(key, 1.0) is None, "a ghost"
    assert node.catalog.removed_ids == []
    assert await passes.run()


@pytest.mark.parametrize("payload", ["9" * 15, "9" * 5_000])
async def test_an_announced_revision_that_does_not_exist_is_forgotten(node: DataPlane, payload: str) -> None:
    passes = Passes(node)
    passes.reconciler.revision_heard(payload)
    await passes.run()
    assert passes.reconciler.revision_lag == 0


async def test_2_another_incarnation_under_the_name_replaces_the_one_that_is_held(
    node: DataPlane, other: DataPlane
) -> None:
    old = await node.create_topic("t")
    passes = Passes(node)
    await passes.run()
    await other.catalog.refresh_if_changed()
    await node.membership.withdraw()  # otherwise the name is free only when this node knows of the deletion
    await other.delete_topic(old)
    new = await other.create_topic("t")
    await passes.run()
    assert node.catalog.get("t") == new
    assert set(node.catalog.held) == {new.topic_id}


async def test_3_topic_installed_twice_is_installed_once(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    await node.fill(topic, [300])
    node.catalog.perform(InstallRouted(topic))
    assert node.catalog.performed["discarded"] == 1
    assert node.tail.holds(topic.partitions[0].partition_key), "what is cached of it stays"


async def test_4_the_first_request_that_races_with_a_creation_is_served(node: DataPlane, other: DataPlane) -> None:
    for number in range(20):
        assert node.catalog.get(f"t{number}") is None
        await other.create_topic(f"t{number}")
        answer = await node.send(f"t{number}", batch_of(b"v"))
        assert answer.error_code == ErrorCode.NONE


async def test_5_appends_to_an_earlier_incarnation_are_refused_though_the_node_has_not_heard(
    node: DataPlane, other: DataPlane
) -> None:
    old = await node.create_topic("t")
    await other.catalog.refresh_if_changed()
    await node.membership.withdraw()  # otherwise the name is free only when this node knows of the deletion
    await other.delete_topic(old)
    new = await other.create_topic("t")
    assert node.catalog.get("t") == old
    answer = await node.send(old, batch_of(b"v"))
    assert answer.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert (await other.fetch_one(new, 0)).high_watermark == 0


async def test_6_a_lost_hint_costs_an_interval(node: DataPlane, other: DataPlane) -> None:
    await other.create_topic("t")
    passes = Passes(node, interval_ms=20)
    await passes.reconciler.converge()
    assert passes.seen == [(TICK, False)]
    assert node.catalog.get("t") is not None


async def test_7_tenth_equal_failure_is_logged_as_an_error(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(since: int) -> CatalogChanges:
        raise StorageUnavailable("away")

    passes, changes = Passes(node), node.topics.changes
    monkeypatch.setattr(node.topics, "changes", away)
    with structlog.testing.capture_logs() as logged:
        for _ in range(40):
            with pytest.raises(StorageUnavailable):
                await passes.run()
        # A series of failures does not end with the success of another task.
        await passes.reconciler.keep_place()
    told = [line["failures"] for line in logged if line["log_level"] == "error"]
    assert told == [10, 16, 32]
    assert passes.failures == ["look"] * 40
    monkeypatch.setattr(node.topics, "changes", changes)
    await passes.run()


async def test_8_leases_and_handoffs_continue_while_the_catalog_cannot_be_read(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = asyncio.Event()

    async def hang(since: int) -> CatalogChanges:
        await stuck.wait()
        raise StorageUnavailable("away")

    monkeypatch.setattr(node.topics, "changes", hang)
    passes = Passes(node)
    passes.reconciler.metadata_wake("test")
    hanging = asyncio.create_task(passes.reconciler.converge())
    passes.reconciler.nodes_heard("1")
    await asyncio.wait_for(passes.reconciler.keep_place(), 60)
    stuck.set()
    with pytest.raises(StorageUnavailable):
        await hanging


async def test_9_operations_are_counted_by_their_names(node: DataPlane, other: DataPlane) -> None:
    topic, _ = await other.create_topic("t", 3), await other.create_topic("u")
    passes = Passes(node)
    await passes.run()
    await other.delete_topic(topic)
    await passes.run()
    await passes.run()
    performed = node.catalog.performed
    assert [performed[name] for name in ("install_routed", "install_owned", "remove_routed", "confirm_remove")] == [
        2,
        2,
        1,
        1,
    ]


async def test_10_a_reason_is_taken_before_the_tick_and_several_are_one() -> None:
    wake = Wake()
    wake("notified")
    wake("reconnected")
    assert await wake.wait(0) == "notified"
    assert wake.merged == 1
    assert await wake.wait(0) == TICK


async def test_partitions_move_when_the_live_nodes_change(node: DataPlane) -> None:
    await node.create_topic("t", 40)
    leads = Leaders([1])
    node.catalog.place_by(lambda: lead)
    lead = lambda part: leads.leader(part) == 1  # noqa: E731
    passes = Passes(node)
    await passes.run()
    assert node.catalog.owned == 40
    both = Leaders([1, 2])
    lead = lambda part: both.leader(part) == 1  # noqa: E731
    assert not await passes.run("nodes"), "no revision has changed, and there is work"
    assert 10 < node.catalog.owned < 30
    assert await passes.run()


async def test_converged_tick_reads_the_revision_alone(
    node: DataPlane, other: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, changes, asked = Passes(node, interval_ms=20), node.topics.changes, 0

    async def counted(since: int) -> CatalogChanges:
        nonlocal asked
        asked += 1
        return await changes(since)

    monkeypatch.setattr(node.topics, "changes", counted)
    await node.create_topic("t")
    while passes.seen[-1:] != [(TICK, True)]:
        await passes.reconciler.converge()
    converged = asked
    await passes.reconciler.converge()
    assert (passes.seen[-1], asked) == ((TICK, True), converged)
    # No pending change is lost.
    await other.create_topic("u")
    await passes.reconciler.converge()
    assert passes.seen[-1] == (TICK, False)
    assert node.catalog.get("u") is not None
    await passes.reconciler.converge()
    node.catalog.place_by(lambda: lead)
    lead = lambda key: False  # noqa: E731
    await passes.reconciler.converge()
    assert passes.seen[-1] == (TICK, False), "the live nodes are others, and who should have said so failed"
    assert node.catalog.owned == 0
