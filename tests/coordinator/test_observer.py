"""Violations of consumers and leaders that the observer reports, and partitions that the guard withholds. The tests
cover every row of the observer's table.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import UUID

import pytest

from gateway.coordinator.classic.machine import CLASSIC
from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.classic.observer import (
    CHURN_GENERATIONS,
    CHURN_MS,
    FOLLOW_UP_MS,
    MAX_UNASSIGNED,
    ORPHANED_GENERATIONS,
)
from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.coordinator.facts import MemberId, PartitionsWithheld, ProtocolViolated, Violation
from gateway.coordinator.handoff import HandoffMode, HandoffSettings
from gateway.coordinator.settings import ConsumerSettings
from protocol.consumer import (
    Assignment,
    Subscription,
    TopicPartition,
    decode_assignment,
    encode_assignment,
    encode_subscription,
)
from protocol.errors import ErrorCode

from .scene import REBALANCE_MS, Asked, Scene

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.coordinator.classic.model import Event
    from gateway.coordinator.machine import Step
    from gateway.coordinator.requests import Protocols

STICKY = "cooperative-sticky"
TOPIC = ClusterTopic(UUID(int=1), "t", 3)
CLUSTER = Cluster({"t": TOPIC}, {TOPIC.topic_id: TOPIC})


class Watched(Scene):
    """A scene that knows a topic `t` with three partitions and keeps the observer's reports."""

    def __init__(self, *, group_cooperative_guard: bool = False) -> None:
        """Build a group that holds no answers, so that the test depends on the observer alone."""
        super().__init__(group_cooperative_guard=group_cooperative_guard, handoff=HandoffSettings(HandoffMode.OFF))
        self.seen: list[ProtocolViolated] = []
        self.withheld: list[PartitionsWithheld] = []

    def send_silent(self, event: Event) -> Step:
        # The scene's own checks use no cluster. So this method also runs the machine's step with a cluster and checks
        # it separately.
        with_cluster = CLASSIC.step(self.group, event, CLUSTER, self.now_ms, self.settings)
        taken = super().send_silent(event)
        assert with_cluster.replies == taken.replies
        assert isinstance(with_cluster.group, Group)
        self.group = with_cluster.group
        self.seen += [fact for fact in with_cluster.facts if isinstance(fact, ProtocolViolated)]
        self.withheld += [fact for fact in with_cluster.facts if isinstance(fact, PartitionsWithheld)]
        return taken

    @property
    def kinds(self) -> set[Violation]:
        return {fact.violation for fact in self.seen}

    def only(self, violation: Violation) -> ProtocolViolated:
        (fact,) = [fact for fact in self.seen if fact.violation is violation]
        return fact


def claiming(
    *partitions: int, generation: int = -1, topics: Iterable[str] = ("t",), name: str = STICKY, version: int = 3
) -> Protocols:
    owned = (TopicPartition("t", partitions),) if partitions else ()
    return ((name, encode_subscription(Subscription(version, tuple(topics), None, owned, generation))),)


def given(*partitions: int, topic: str = "t") -> bytes:
    return encode_assignment(Assignment(1, (TopicPartition(topic, partitions),), b"user data"))


def partitions_of(asked: Asked) -> set[int]:
    return {
        each for _, partitions in decode_assignment(asked.sync.assignment).assigned_partitions for each in partitions
    }


def two(scene: Watched, first: Protocols | None = None, second: Protocols | None = None) -> tuple[str, str]:
    """Return members a (the leader) and b in a generation whose assignments are still missing."""
    a, b = scene.completing("a", "b", offer=claiming())
    if first is None and second is None:
        return a, b
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0, 1, 2), b: given()})
    again(scene, (a, first or claiming()), (b, second or claiming()))
    return a, b


def again(scene: Watched, *members: tuple[str, Protocols]) -> None:
    """Run the next generation of the members a, b, … of the scene."""
    for connection, (member_id, offer) in zip("abc", members, strict=False):
        scene.join(connection, member_id, offer=offer)
    assert scene.state is GroupState.COMPLETING_REBALANCE


def test_correct_group_has_no_reports() -> None:
    scene = Watched()
    a, b = two(scene, claiming(0, 1, 2, generation=2), claiming(generation=2))
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0, 1), b: given()})
    again(scene, (a, claiming(0, 1, generation=scene.generation)), (b, claiming(generation=scene.generation)))
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0, 1), b: given(2)})
    assert not scene.seen


def test_partition_claimed_twice_in_one_generation_is_reported() -> None:
    scene = Watched()
    a, b = two(scene, claiming(0, 1, 2, generation=2), claiming(2, generation=2))
    fact = scene.only(Violation.DOUBLE_CLAIM)
    assert (set(fact.members), fact.partitions) == ({a, b}, (("t", 2),))


def test_older_claim_is_no_double_claim() -> None:
    scene = Watched()
    two(scene, claiming(0, 1, 2, generation=2), claiming(2, generation=1))
    assert Violation.DOUBLE_CLAIM not in scene.kinds


def test_a_claim_from_before_the_last_assignment_is_stale() -> None:
    scene = Watched()
    a, _ = two(scene, claiming(0, 1, 2, generation=0), claiming())
    fact = scene.only(Violation.STALE_CLAIM)
    assert (fact.members, fact.partition_count) == ((a,), 3)


def test_claim_of_undelivered_partitions_is_reported() -> None:
    scene = Watched()
    _, b = two(scene, claiming(0, 1, 2, generation=2), claiming(1, generation=-1, version=1))
    fact = scene.only(Violation.UNDELIVERED_CLAIM)
    assert (fact.members, fact.partitions) == ((b,), (("t", 1),))


def test_delivered_partitions_without_a_claim_are_reported() -> None:
    scene = Watched()
    a, b = scene.completing("a", "b", offer=claiming())
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0, 1, 2), b: given()})
    again(scene, (a, claiming(0, generation=scene.generation)), (b, claiming()))
    fact = scene.only(Violation.DELIVERED_UNCLAIMED)
    assert (fact.members, fact.partitions) == ((a,), (("t", 1), ("t", 2)))


def test_member_that_claims_nothing_is_named() -> None:
    """To the coordinator, a callback that calls assign instead of incremental_assign looks like this."""
    scene = Watched()
    a, b = scene.completing("a", "b", offer=claiming())
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0, 1, 2), b: given()})
    again(scene, (a, claiming(generation=scene.generation)), (b, claiming()))
    assert scene.only(Violation.NOTHING_TAKEN).members == (a,)


def test_a_member_that_offers_an_eager_protocol_too_is_eager_and_not_blamed() -> None:
    """KIP-429: a member of Java's consumer that offers both kinds of protocols revokes everything before it joins, even
    if the group has chosen the cooperative one.
    """
    scene = Watched()
    both = (*claiming(), *claiming(name="range"))
    a, b = scene.completing("a", "b", offer=both)
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0, 1, 2), b: given()})
    assert scene.group.protocol_name == STICKY
    nothing = (*claiming(generation=scene.generation), *claiming(generation=scene.generation, name="range"))
    again(scene, (a, nothing), (b, nothing))
    assert not scene.kinds & {Violation.NOTHING_TAKEN, Violation.DELIVERED_UNCLAIMED}


def test_a_member_that_lost_everything_is_not_blamed() -> None:
    """The member's claim names no generation. So the member has learnt that it was removed, and owns nothing."""
    scene = Watched()
    two(scene, claiming(generation=-1), claiming())
    assert Violation.NOTHING_TAKEN not in scene.kinds


def test_partitions_of_a_topic_it_reads_no_more_need_not_be_claimed() -> None:
    scene = Watched()
    a, b = scene.completing("a", "b", offer=claiming())
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0), b: given()})
    again(scene, (a, claiming(generation=scene.generation, topics=("u",))), (b, claiming()))
    assert not scene.seen


def test_leader_that_moves_claimed_partitions_is_reported() -> None:
    scene = Watched()
    a, b = two(scene, claiming(0, 1, 2, generation=2), claiming())
    held = scene.sync("b", b)
    scene.sync("a", a, {a: given(0, 1), b: given(2)})
    fact = scene.only(Violation.MOVED_WHILE_CLAIMED)
    assert (set(fact.members), fact.partitions) == ({a, b}, (("t", 2),))
    assert partitions_of(held) == {2}, "without the guard the leader's bytes go through"


def test_an_eager_group_may_move_what_was_claimed() -> None:
    scene = Watched()
    a, b = scene.completing("a", "b", offer=claiming(0, 1, 2, name="range"))
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0, 1), b: given(2)})
    assert Violation.MOVED_WHILE_CLAIMED not in scene.kinds


def test_partition_assigned_twice_is_reported() -> None:
    scene = Watched()
    a, b = two(scene)
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0, 1, 2), b: given(2)})
    fact = scene.only(Violation.ASSIGNED_TWICE)
    assert (set(fact.members), fact.partitions) == ({a, b}, (("t", 2),))


def test_very_many_partitions_assigned_twice_are_found_quickly() -> None:
    """An assignor may give all partitions to each member."""
    scene = Watched()
    a, b = two(scene)
    all_of_them = given(*range(3_500))
    scene.sync("b", b)
    started = time.process_time()
    scene.sync("a", a, {a: all_of_them, b: all_of_them})
    assert time.process_time() - started < 1, "seconds: reading all assignments for each partition takes ten"
    assert scene.only(Violation.ASSIGNED_TWICE).partition_count == 3_500


def test_assignments_of_unknown_members_topics_or_partitions_are_reported() -> None:
    scene = Watched()
    a, b = two(scene)
    scene.sync("b", b)
    scene.sync("a", a, {a: given(-1, 0, 1, 7), b: given(2, topic="u"), "stranger": given(2)})
    assert scene.only(Violation.NO_SUCH_PARTITION).partitions == (("t", -1), ("t", 7))
    assert scene.only(Violation.NOT_SUBSCRIBED).partitions == (("u", 2),)
    assert scene.only(Violation.UNKNOWN_MEMBER).members == ("stranger",)


def test_partition_without_an_owner_is_reported() -> None:
    scene = Watched()
    (a,) = scene.completing("a", offer=claiming())
    for generation in range(1, ORPHANED_GENERATIONS + 2):
        scene.sync("a", a, {a: given(0, 1)})
        told = [fact for fact in scene.seen if fact.violation is Violation.ORPHANED]
        assert len(told) == (generation >= ORPHANED_GENERATIONS), "it is told once"
        again(scene, (a, claiming(0, 1, generation=scene.generation)))
    assert scene.only(Violation.ORPHANED).partitions == (("t", 2),)


@pytest.mark.parametrize(("partition_count", "remembered"), [(MAX_UNASSIGNED, MAX_UNASSIGNED), (MAX_UNASSIGNED + 1, 0)])
def test_partitions_without_an_owner_are_remembered_up_to_a_bound(partition_count: int, remembered: int) -> None:
    scene = Scene()
    topic = ClusterTopic(UUID(int=1), "t", partition_count)
    scene.cluster = Cluster({"t": topic}, {topic.topic_id: topic})
    (a,) = scene.completing("a", offer=claiming())
    scene.sync("a", a, {a: given()})
    assert len(scene.group.watch.unassigned) == remembered


def test_half_finished_cooperative_upgrade_is_reported() -> None:
    scene = Watched()
    both = (*claiming(name="range"), *claiming())
    a, b = scene.completing("a", "b", offer=both)
    fact = scene.seen[-1]
    assert (fact.violation, set(fact.members)) == (Violation.MIXED_MODE, {a, b})
    scene.sync("b", b)
    scene.sync("a", a, {})
    again(scene, (a, (*claiming(), *claiming(name="range"))), (b, (*claiming(), *claiming(name="range"))))
    assert scene.group.protocol_name == STICKY
    assert scene.seen[-1].violation is Violation.MODE_CHANGED


EAGER = claiming(name="range")
BOTH = (*claiming(), *EAGER)
AS_JAVA_COMES = (*EAGER, *claiming())


@pytest.mark.parametrize(
    ("first", "second", "half_way"),
    [
        (EAGER, EAGER, False),
        (BOTH, EAGER, True),
        (BOTH, BOTH, True),
        (BOTH, claiming(), True),
        (claiming(), claiming(), False),
        (AS_JAVA_COMES, AS_JAVA_COMES, False),
        (AS_JAVA_COMES, claiming(), True),
    ],
)
def test_members_of_a_half_finished_upgrade_are_named(first: Protocols, second: Protocols, half_way: bool) -> None:
    scene = Watched()
    a, b = scene.completing("a", "b", offer=BOTH)
    scene.sync("b", b)
    scene.sync("a", a, {})
    again(scene, (a, first), (b, second))
    assert scene.group.watch.half_way is half_way


def test_returning_static_member_with_both_protocols_is_half_upgraded() -> None:
    scene = Watched()
    a, b = scene.completing("a", "b", instances={"b": "ib"}, offer=EAGER)
    scene.sync("b", b, instance="ib")
    scene.sync("a", a, {a: given(0), b: given(1)})
    assert not scene.group.watch.half_way
    scene.join("b2", instance="ib", offer=BOTH)
    assert scene.state is GroupState.STABLE
    assert scene.group.watch.half_way
    for member_id in tuple(scene.group.members):
        scene.leave("a", member_id)
    assert not scene.group.watch.half_way, "nobody is left"


@pytest.mark.parametrize("pause_ms", [0, CHURN_MS // CHURN_GENERATIONS + 1])
def test_rebalances_without_a_cause_are_reported(pause_ms: int) -> None:
    scene = Watched()
    (a,) = scene.completing("a", offer=claiming())
    for _ in range(CHURN_GENERATIONS):
        scene.sync("a", a, {a: given(0, 1, 2)})
        scene.now_ms += pause_ms
        again(scene, (a, claiming(0, 1, 2, generation=scene.generation)))
    assert (Violation.CHURN in scene.kinds) is (pause_ms == 0)


def test_unreadable_metadata_is_ignored() -> None:
    scene = Watched(group_cooperative_guard=True)
    a, b = scene.completing("a", "b", offer=((STICKY, b"\x00\x01torn"),))
    assert set(scene.seen[-1].members) == {a, b}
    assert scene.kinds == {Violation.UNREADABLE_SUBSCRIPTION}
    held = scene.sync("b", b)
    scene.sync("a", a, {a: b"torn", b: given(1)})
    assert held.sync.assignment == given(1)
    assert scene.only(Violation.UNREADABLE_ASSIGNMENT).members == (a,)


def test_other_protocol_types_are_not_observed() -> None:
    scene = Watched()
    a = scene.join("a", protocol_type="connect", offer=((STICKY, b""),)).join.member_id
    scene.sync("a", a, {a: b"?"})
    assert not scene.seen


def test_many_offenders_are_counted_and_few_named() -> None:
    scene = Watched()
    connections = [f"c{number}" for number in range(15)]
    scene.completing(*connections, offer=claiming(0))
    fact = scene.only(Violation.DOUBLE_CLAIM) if len(scene.seen) == 1 else scene.seen[-1]
    assert (len(fact.members), fact.member_count) == (10, 15)


# --- the guard ------------------------------------------------------------------------------------------------------


def test_guard_withholds_partitions_that_another_member_claims() -> None:
    scene = Watched(group_cooperative_guard=True)
    a, b = two(scene, claiming(0, 1, 2, generation=2), claiming())
    held = scene.sync("b", b)
    own = scene.sync("a", a, {a: given(0), b: given(1, 2)})
    assert (partitions_of(own), partitions_of(held)) == ({0}, set())
    assert decode_assignment(held.sync.assignment).user_data == b"user data"
    (fact,) = scene.withheld
    assert (fact.members, fact.partitions) == ((b,), (("t", 1), ("t", 2)))
    again(scene, (a, claiming(0, generation=scene.generation)), (b, claiming()))
    held = scene.sync("b", b)
    scene.sync("a", a, {a: given(0), b: given(1, 2)})
    assert partitions_of(held) == {1, 2}, "let go, and so given"
    assert len(scene.withheld) == 1


@pytest.mark.parametrize("guards", [True, False])
def test_guard_can_be_set_per_group(guards: bool) -> None:
    scene = Watched(group_cooperative_guard=not guards)
    own = {scene.group.group_id: ConsumerSettings(cooperative_guard=guards)}
    scene.settings = replace(scene.settings, consumer_of=own)
    a, b = two(scene, claiming(0, 1, 2, generation=2), claiming())
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0), b: given(1, 2)})
    assert bool(scene.withheld) is guards


def test_guard_forces_a_rebalance_that_does_not_follow() -> None:
    scene = Watched(group_cooperative_guard=True)
    a, b = two(scene, claiming(0, 1, 2, generation=2), claiming())
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0), b: given(1, 2)})
    began_ms = scene.now_ms
    while scene.now_ms < began_ms + FOLLOW_UP_MS - 5_000:
        scene.advance(5_000)
        scene.heartbeat("a", a)
        scene.heartbeat("b", b)
    assert scene.state is GroupState.STABLE
    scene.advance(5_000)
    assert scene.state is GroupState.PREPARING_REBALANCE
    assert scene.heartbeat("b", b).error is ErrorCode.REBALANCE_IN_PROGRESS
    assert scene.group.watch.follow_up_ms is None


def test_guard_keeps_assignments_that_need_no_change() -> None:
    """The bytes stay the same, even in a version that this gateway would write differently."""
    scene = Watched(group_cooperative_guard=True)
    a, b = two(scene, claiming(0, 1, generation=2), claiming())
    newer = b"\x00\x09" + given(2)[2:] + b"what version 9 adds"
    held = scene.sync("b", b)
    scene.sync("a", a, {a: given(0, 1), b: newer})
    assert held.sync.assignment == newer
    assert not scene.withheld
    assert scene.group.watch.follow_up_ms is None


def test_departed_member_claims_nothing() -> None:
    scene = Watched(group_cooperative_guard=True)
    a, b = two(scene, claiming(), claiming(0, 1, 2, generation=2))
    scene.leave("b", b)
    again(scene, (a, claiming()))
    own = scene.sync("a", a, {a: given(0, 1, 2)})
    assert partitions_of(own) == {0, 1, 2}


def test_a_follower_cannot_assign_past_the_guard() -> None:
    scene = Watched(group_cooperative_guard=True)
    a, b = two(scene, claiming(0, generation=2), claiming())
    held = scene.sync("b", b, {b: given(0)})
    assert held.parked
    scene.sync("a", a, {a: given(0), b: given(0)})
    assert partitions_of(held) == set()


def test_delivered_partitions_are_kept_for_current_members_alone() -> None:
    scene = Watched()
    a, b = two(scene, claiming(0, 1, 2, generation=2), claiming())
    assert set(scene.group.watch.delivered) == {a, b}
    scene.leave("b", b)
    again(scene, (a, claiming()))
    assert set(scene.group.watch.delivered) == {MemberId(a)}


def test_absent_static_member_keeps_its_delivered_partitions() -> None:
    """The member joined before it owned anything, so its metadata claims nothing, and the leader believes that."""
    scene = Watched(group_cooperative_guard=True)
    instances = {"b": "ib"}
    a, b = scene.completing("a", "b", instances=instances, offer=claiming())
    scene.sync("b", b, instance="ib")
    scene.sync("a", a, {a: given(), b: given(0, 1, 2)})
    scene.join("a", a, offer=claiming())
    for _ in range(REBALANCE_MS // 5_000):
        assert scene.state is GroupState.PREPARING_REBALANCE
        scene.heartbeat("b", b, instance="ib")
        scene.advance(5_000)
    assert scene.state is GroupState.COMPLETING_REBALANCE
    own = scene.sync("a", a, {a: given(0, 1), b: given(2)})
    assert partitions_of(own) == set(), "the one that is away has not let go"
    back = scene.join("b2", instance="ib", offer=claiming()).join.member_id
    scene.join("a", a, offer=claiming())
    scene.join("b2", back, instance="ib", offer=claiming())
    own = scene.sync("a", a, {a: given(0, 1), back: given(2)})
    assert partitions_of(own) == {0, 1}, "another process has its place, and holds nothing"


def test_member_that_missed_its_answer_keeps_its_partitions() -> None:
    """The member's claim is of an older generation than its last assignment, because it never received the answer with
    that assignment.
    """
    scene = Watched(group_cooperative_guard=True)
    a, b = two(scene, claiming(0, 1, 2, generation=2), claiming())
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0), b: given()})
    again(scene, (a, claiming(0, 1, 2, generation=2)), (b, claiming()))
    assert Violation.STALE_CLAIM in scene.kinds
    held = scene.sync("b", b)
    scene.sync("a", a, {a: given(0), b: given(1, 2)})
    assert partitions_of(held) == set()
