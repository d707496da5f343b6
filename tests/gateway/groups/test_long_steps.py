"""Steps over very many partitions run in a thread. No other request waits for them, and they have no other effect."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest

from gateway.coordinator.classic.machine import CLASSIC
from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.coordinator.consumer.machine import CONSUMER, MAX_NAMES_READ
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerGroupHeartbeat, ConsumerMember
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import (
    LONG_BYTES,
    MANY,
    ClusterChanged,
    ConnectionId,
    Event,
    Machines,
    RequestId,
    Step,
    Tick,
)
from gateway.coordinator.requests import JoinGroup, LeaveGroup, LeavingMember, SyncGroup
from gateway.coordinator.settings import Settings
from gateway.coordinator.share.machine import SHARE
from gateway.coordinator.share.model import ShareGroup, ShareGroupHeartbeat, ShareMember
from gateway.groups.kinds import AnyGroup
from gateway.groups.runtime import Runtime
from gateway.security.acls import Acls
from gateway.security.authorizer import Describing
from protocol.errors import ErrorCode
from storage.types import CoordinatorLease, NodeId
from tests.coordinator.scene import Scene as Classic
from tests.gateway.groups.records import Record, Records

WIDE = 2 * MANY
TOPICS = tuple(f"t{number}" for number in range(WIDE))


class Leases:
    lease = CoordinatorLease(0, NodeId(1), 1)

    def lease_for(self, group_id: str) -> CoordinatorLease | None:
        return self.lease


class Halting(Machines[AnyGroup, Settings]):
    """Records in which thread each step runs. Steps in worker threads wait until the test continues them."""

    def __init__(self) -> None:
        super().__init__(CLASSIC, CONSUMER)
        self.here: list[type] = []
        self.apart: list[type] = []
        self.may_go_on = threading.Event()
        self.fails = False
        self._loop_thread = threading.get_ident()

    def step(self, group: AnyGroup, event: Event, cluster: Cluster, now_ms: int, settings: Settings) -> Step[AnyGroup]:
        if threading.get_ident() == self._loop_thread:
            self.here.append(type(event))
        else:
            self.apart.append(type(event))
            assert self.may_go_on.wait(10)
            if self.fails:
                raise ValueError("a bug")
        return super().step(group, event, cluster, now_ms, settings)


class Scene:
    def __init__(self) -> None:
        self.machines, self.records, self.leases = Halting(), Records(), Leases()
        self.groups = Runtime(self.machines, self.records, self.leases, Settings(), lambda before, after, facts: None)
        self.groups.cluster_changed(cluster(1))

    def heartbeat(self, group_id: str, epoch: int, names: tuple[str, ...] | None) -> Any:
        return self.groups.submit(group_id, self.said(epoch, names))

    def said(self, epoch: int, names: tuple[str, ...] | None = None, member_id: str = "m") -> ConsumerGroupHeartbeat:
        return ConsumerGroupHeartbeat(
            request_id=self.groups.next_request_id(),
            connection_id=ConnectionId("c"),
            connection_number=1,
            version=1,
            client_id="client",
            client_host="/127.0.0.1",
            new_member_id=MemberId("m"),
            member_id=MemberId(member_id),
            member_epoch=epoch,
            rebalance_timeout_ms=60_000 if names is not None else -1,
            subscribed_topic_names=names,
            owned={} if names is not None else None,
        )

    async def settle(self, group_id: str, names: tuple[str, ...]) -> int:
        """Join the group and take over the assignment; return the member's epoch."""
        reply = await self.heartbeat(group_id, 0, names)
        assert reply.error is ErrorCode.NONE
        return reply.member_epoch

    @contextmanager
    def freely(self) -> Iterator[None]:
        self.machines.may_go_on.set()
        yield
        self.machines.may_go_on.clear()


def cluster(revision: int, partition_count: int = 1) -> Cluster:
    topics = [ClusterTopic(UUID(int=number + 1), name, partition_count) for number, name in enumerate(TOPICS)]
    return Cluster(
        MappingProxyType({topic.name: topic for topic in topics}),
        MappingProxyType({topic.topic_id: topic for topic in topics}),
        revision,
    )


async def once_apart(scene: Scene) -> None:
    while not scene.machines.apart:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_other_groups_continue_during_a_long_step() -> None:
    scene = Scene()
    epoch = await scene.settle("narrow", TOPICS[:1])
    joining = scene.heartbeat("wide", 0, TOPICS)
    await once_apart(scene)
    assert scene.heartbeat("narrow", epoch, None).error is ErrorCode.NONE
    behind = scene.heartbeat("wide", 1, None)
    assert not joining.done()
    assert not behind.done()
    scene.machines.may_go_on.set()
    joined = await joining
    assert (joined.error, joined.member_epoch, len(joined.assignment)) == (ErrorCode.NONE, 1, WIDE)
    assert (await behind).error is ErrorCode.NONE
    assert scene.machines.apart == [ConsumerGroupHeartbeat]
    stored = scene.records.stored["wide"]
    assert isinstance(stored, ConsumerGroup)
    assert len(stored.target[MemberId("m")]) == WIDE
    await scene.groups.drain()


async def test_unchanged_heartbeat_is_answered_in_the_call() -> None:
    scene = Scene()
    with scene.freely():
        epoch = await scene.settle("wide", TOPICS)
    assert scene.heartbeat("wide", epoch, None).error is ErrorCode.NONE
    await scene.groups.drain()


async def test_only_an_unchanged_heartbeat_of_a_settled_member_is_answered_in_the_call() -> None:
    scene = Scene()
    with scene.freely():
        epoch = await scene.settle("wide", TOPICS)
    group = scene.records.stored["wide"]
    assert not CONSUMER.is_long(group, scene.said(epoch), cluster(1))
    for waits, event in (
        (replace(group, assignment_epoch=epoch + 1), scene.said(epoch)),
        (group, scene.said(epoch - 1)),
        (group, scene.said(epoch, member_id="another")),
        (group, scene.said(epoch, TOPICS)),
    ):
        assert CONSUMER.is_long(waits, event, cluster(1)), event
    await scene.groups.drain()


async def test_pattern_with_another_principal_or_acls_runs_in_a_thread() -> None:
    """A small group also needs a thread, because the check covers all topics that the pattern matches."""
    scene = Scene()
    nobody = Describing(Acls(), frozenset(), allow_everyone=False)
    before = replace(cluster(1), describing=nobody)
    joins = replace(scene.said(0, ()), subscribed_topic_regex=".*", principal="User:alice")
    group = CONSUMER.step(CONSUMER.missing("g"), joins, before, 0, Settings()).group
    assert isinstance(group, ConsumerGroup)
    (member,) = group.members.values()
    assert not member.assigned
    said = replace(scene.said(member.member_epoch), principal="User:alice")
    assert not CONSUMER.is_long(group, said, before)
    after = replace(before, describing=Describing(Acls(), frozenset(), allow_everyone=False))
    assert CONSUMER.is_long(group, ClusterChanged(), after)
    assert CONSUMER.is_long(group, said, after)
    for other in ({"principal": "User:bob"}, {"client_host": "/10.0.0.9"}):
        assert CONSUMER.is_long(group, replace(said, **other), before), other
    assert not CONSUMER.is_long(replace(group, subscriptions={(TOPICS[:1], "", None): 1}), said, after)
    await scene.groups.drain()


async def test_topic_changes_of_a_wide_group_run_in_a_thread() -> None:
    scene = Scene()
    with scene.freely():
        await scene.settle("wide", TOPICS)
        scene.machines.apart.clear()
        scene.groups.cluster_changed(cluster(2, 2))
        await once_apart(scene)
        while scene.groups.under_way:  # noqa: ASYNC110
            await asyncio.sleep(0)
    stored = scene.records.stored["wide"]
    assert isinstance(stored, ConsumerGroup)
    (target,) = stored.target.values()
    assert sum(map(len, target.values())) == 2 * WIDE
    await scene.groups.drain()


async def test_long_step_that_lost_its_lease_stores_nothing() -> None:
    scene = Scene()
    joining = scene.heartbeat("wide", 0, TOPICS)
    await once_apart(scene)
    scene.groups.shard_lost(0)
    assert (await joining).error is ErrorCode.NOT_COORDINATOR
    scene.machines.may_go_on.set()
    await scene.groups.drain()
    assert not scene.records.stored


async def test_long_step_is_dropped_if_another_node_held_the_lease() -> None:
    scene = Scene()
    with scene.freely():
        epoch = await scene.settle("wide", TOPICS)
    scene.machines.apart.clear()
    saying = scene.heartbeat("wide", epoch, TOPICS)
    await once_apart(scene)
    scene.leases.lease = CoordinatorLease(0, NodeId(1), 3)
    scene.machines.may_go_on.set()
    assert (await saying).error is ErrorCode.NOT_COORDINATOR
    await scene.groups.drain()


async def test_bug_in_a_long_step_answers_all_waiting_requests() -> None:
    scene = Scene()
    with scene.freely():
        epoch = await scene.settle("wide", TOPICS)
    scene.machines.fails = True
    scene.machines.may_go_on.set()
    assert (await scene.heartbeat("wide", epoch, TOPICS)).error is ErrorCode.UNKNOWN_SERVER_ERROR
    scene.machines.fails = False
    assert isinstance(Record(scene.records.stored["wide"]).group, ConsumerGroup)
    assert (await scene.heartbeat("wide", 0, TOPICS)).error is ErrorCode.NONE
    await scene.groups.drain()


async def test_a_long_step_that_changes_nothing_is_answered() -> None:
    scene = Scene()
    with scene.freely():
        epoch = await scene.settle("wide", TOPICS)
        stored = scene.records.stored.pop("wide")
        async with asyncio.timeout(30):
            assert (await scene.heartbeat("wide", epoch, TOPICS)).error is ErrorCode.NONE
    assert scene.machines.apart[-1] is ConsumerGroupHeartbeat
    assert not scene.records.stored, stored
    await scene.groups.drain()


async def test_consecutive_long_steps_all_run_in_threads() -> None:
    scene = Scene()
    joining = [scene.heartbeat("wide", 0, TOPICS) for _ in range(3)]
    scene.machines.may_go_on.set()
    async with asyncio.timeout(30):
        assert [(await joined).error for joined in joining] == [ErrorCode.NONE] * 3
    assert scene.machines.apart == [ConsumerGroupHeartbeat] * 3
    assert ConsumerGroupHeartbeat not in scene.machines.here
    await scene.groups.drain()


def rebalancing(metadata_bytes: int) -> tuple[Group, JoinGroup]:
    """Return a group of five members, one of which has not joined again, and that member's JoinGroup."""
    scene = Classic()
    offer = (("range", bytes(metadata_bytes)),)
    for connection, member_id in list(zip("abcd", scene.stable(*"abcde", offer=offer), strict=False)):
        scene.join(connection, member_id, offer=offer)
    assert scene.state is GroupState.PREPARING_REBALANCE
    (last,) = (member_id for member_id, member in scene.group.members.items() if member.parked_join is None)
    asked = (RequestId(100), ConnectionId("e"), 9, "client", "/127.0.0.1", last, None)
    return scene.group, JoinGroup(*asked, "consumer", offer, 10_000, 60_000, MemberId("new"))


@pytest.mark.parametrize(("metadata_bytes", "is_long"), [(LONG_BYTES // 4, True), (LONG_BYTES // 8, False)])
async def test_step_that_reads_long_subscriptions_of_all_members_runs_in_a_thread(
    metadata_bytes: int, is_long: bool
) -> None:
    """The end of a join phase reads them, and so do the assignment and an upgrade."""
    group, joins = rebalancing(metadata_bytes)
    leaves = LeaveGroup(joins.request_id, joins.connection_id, (LeavingMember(joins.member_id, None),))
    for event in (joins, leaves, Tick()):
        assert CLASSIC.is_long(group, event, cluster(1)) is is_long, event
        assert not CLASSIC.is_long(replace(group, state=GroupState.STABLE), event, cluster(1)), event
    for waits in (replace(group, awaiting_join=3), replace(group, initial_delay_remaining_ms=0)):
        assert not CLASSIC.is_long(waits, joins, cluster(1)), "the join phase continues"
    completing = CLASSIC.step(group, joins, cluster(1), 0, Settings()).group
    assert isinstance(completing, Group)
    for member_id in completing.members:
        syncs = SyncGroup(joins.request_id, joins.connection_id, member_id, None, 1, None, None, ())
        assigns = member_id == completing.leader_id
        assert CLASSIC.is_long(completing, syncs, cluster(1)) is (is_long and assigns)
    scene = Scene()
    assert CONSUMER.is_long(group, scene.said(0, TOPICS[:1]), cluster(1)) is is_long
    await scene.groups.drain()


async def test_join_of_a_group_with_many_different_subscriptions_runs_in_a_thread() -> None:
    """The step reads all subscriptions, even if none of the topics exists."""
    scene = Scene()
    names = [TOPICS[at : at + 400] for at in (0, 400, 800)]
    shares = ShareGroupHeartbeat(
        RequestId(1), ConnectionId("c"), "client", "/127.0.0.1", MemberId("m"), 0, None, ("t",)
    )
    for count, is_long in ((2, False), (3, True)):
        group = ConsumerGroup("g", subscriptions={(each, "", None): 1 for each in names[:count]})
        assert CONSUMER.is_long(group, scene.said(0, TOPICS[:1]), cluster(1)) is is_long
        members = {
            member_id: ShareMember(member_id, subscribed_topic_names=each)
            for member_id, each in zip(map(MemberId, "abc"), names[:count], strict=False)
        }
        assert SHARE.is_long(ShareGroup("g", members=members), shares, cluster(1)) is is_long
    await scene.groups.drain()


def test_topics_of_a_group_with_very_many_different_subscriptions_count_as_unknown() -> None:
    """Reading them after each step would stop the node."""
    member = ConsumerMember(MemberId("m"))
    names = [tuple(f"{place}-{number}" for number in range(MAX_NAMES_READ // 2)) for place in range(3)]
    for count, known in ((2, True), (3, False)):
        group = ConsumerGroup(
            "g",
            members={member.member_id: member},
            subscriptions={(each, "", None): 1 for each in names[:count]},
            seen=Cluster(),
        )
        assert (CONSUMER.summary(group).subscribed_topics is not None) is known
    assert SHARE.summary(ShareGroup("g")).subscribed_topics is None, "a share group commits no offsets"
