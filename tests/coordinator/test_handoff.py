"""Partitions that move between members of classic groups: which members are held, what ends each wait, and that members
never wait for each other in a circle.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from gateway.coordinator.classic.handoff import awaited_by, draining
from gateway.coordinator.classic.machine import CLASSIC, restore, stored, stored_member
from gateway.coordinator.classic.model import Event, Group, GroupState
from gateway.coordinator.cluster import Cluster, ClusterTopic
from gateway.coordinator.facts import MemberId
from gateway.coordinator.handoff import (
    LONGEST_HOLD_MS,
    Drained,
    HandoffBegun,
    HandoffEnd,
    HandoffEnded,
    HandoffMode,
    HandoffSettings,
)
from gateway.coordinator.machine import ClusterChanged, Document, Step
from gateway.coordinator.requests import HandoffProgress, JoinGroup, OffsetCommitReply, Protocols, SyncGroup
from protocol.consumer import Assignment, Subscription, TopicPartition, encode_assignment, encode_subscription
from protocol.errors import ErrorCode

from .scene import SESSION_MS, Asked, Scene

NONE, REBALANCING, UNKNOWN = ErrorCode.NONE, ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.UNKNOWN_MEMBER_ID
STICKY, EAGER = "cooperative-sticky", "range"
TIMEOUT_MS = 30_000
HOLD_MS = SESSION_MS // 2


class Handing(Scene):
    """A scene that records the events of handoffs."""

    def __init__(self, mode: HandoffMode = HandoffMode.ACK, timeout_ms: int = TIMEOUT_MS, **settings: Any) -> None:
        super().__init__(handoff=HandoffSettings(mode, timeout_ms), **settings)
        self.begun: list[HandoffBegun] = []
        self.ended: list[HandoffEnded] = []

    def send_silent(self, event: Event) -> Step:
        taken = super().send_silent(event)
        self.begun += [fact for fact in taken.facts if isinstance(fact, HandoffBegun)]
        self.ended += [fact for fact in taken.facts if isinstance(fact, HandoffEnded)]
        return taken

    @property
    def reasons(self) -> list[HandoffEnd]:
        return [fact.reason for fact in self.ended]

    def drained(self, source: str, partition: int, mark: int | None, committed: int) -> None:
        found = Drained("t", partition, MemberId(source), mark, committed)
        self.send_silent(HandoffProgress((found,)))


def owning(*partitions: int, name: str = STICKY, generation: int = -1) -> Protocols:
    owned = (TopicPartition("t", partitions),) if partitions else ()
    return ((name, encode_subscription(Subscription(3, ("t",), None, owned, generation))),)


def given(*partitions: int) -> bytes:
    return encode_assignment(Assignment(1, (TopicPartition("t", partitions),) if partitions else ()))


def again(scene: Scene, *members: tuple[str, Protocols]) -> None:
    """Start the next generation of the members on connections a, b, …"""
    for connection, (member_id, offer) in zip("abc", members, strict=False):
        scene.join(connection, member_id, offer=offer)
    assert scene.state is GroupState.COMPLETING_REBALANCE


def assigned(scene: Scene, shares: dict[str, bytes]) -> dict[str, Asked]:
    """Let all members sync, followers first. The first of `shares` is for the member of connection a, and so on."""
    asked: dict[str, Asked] = {}
    for connection, member_id in reversed(list(zip("abc", shares, strict=False))):
        asked[member_id] = scene.sync(connection, member_id, shares if member_id == scene.group.leader_id else None)
    return asked


def rude(scene: Handing) -> tuple[str, str, dict[str, Asked]]:
    """Let the leader assign a partition to b that a still claims."""
    a, b = scene.completing("a", "b", offer=owning())
    assigned(scene, {a: given(0, 1, 2), b: given()})
    again(scene, (a, owning(0, 1, 2)), (b, owning()))
    return a, b, assigned(scene, {a: given(0, 1), b: given(2)})


def moved(scene: Handing, name: str = EAGER) -> tuple[str, str, dict[str, Asked]]:
    """Move partition 2 by the rules: a releases it, and then b receives it."""
    a, b = scene.completing("a", "b", offer=owning(name=name))
    assigned(scene, {a: given(0, 1, 2), b: given()})
    if name == STICKY:
        again(scene, (a, owning(0, 1, 2)), (b, owning()))
        assigned(scene, {a: given(0, 1), b: given()})
        again(scene, (a, owning(0, 1)), (b, owning()))
    else:
        again(scene, (a, owning(name=name)), (b, owning(name=name)))
    return a, b, assigned(scene, {a: given(0, 1), b: given(2)})


# --- acknowledgement --------------------------------------------------------------------------------------------------


def test_target_is_held_until_the_source_releases() -> None:
    scene = Handing()
    a, b, asked = rude(scene)
    assert asked[a].sync.assignment == given(0, 1), "the source is answered at once"
    assert asked[b].parked
    (begun,) = scene.begun
    assert (begun.source, begun.target, begun.partitions) == (a, b, (("t", 2),))
    scene.join("a", a, offer=owning(0, 1))
    assert asked[b].error is REBALANCING, "whoever is held learns of the next rebalance at once"
    scene.join("b", b, offer=owning())
    assert scene.reasons == [HandoffEnd.ACKNOWLEDGED]
    assert assigned(scene, {a: given(0, 1), b: given(2)})[b].sync.assignment == given(2)
    assert not scene.group.handoffs


@pytest.mark.parametrize("name", [EAGER, STICKY])
def test_cooperative_group_is_not_held(name: str) -> None:
    scene = Handing()
    _, b, asked = moved(scene, name)
    assert asked[b].sync.assignment == given(2)
    assert not scene.begun
    assert not scene.group.handoffs


def test_mode_off_holds_no_member() -> None:
    scene = Handing(HandoffMode.OFF)
    _, b, asked = rude(scene)
    assert asked[b].sync.assignment == given(2)
    assert not scene.begun


def test_a_sync_is_held_for_half_a_session_and_ten_seconds_at_most() -> None:
    scene = Handing()
    _, b, asked = rude(scene)
    scene.advance(HOLD_MS - 1)
    assert asked[b].parked
    scene.advance(1)
    assert asked[b].sync.assignment == given(2)
    assert HOLD_MS < LONGEST_HOLD_MS
    assert not scene.ended, "OffsetFetch goes on telling it to wait"
    assert awaited_by(scene.group, "b", "", "") == {("t", 2)}
    assert scene.sync("b", b).sync.assignment == given(2), "who asks again is not held again"


def test_wait_ends_after_its_time() -> None:
    scene = Handing()
    a, b, _ = rude(scene)
    for _ in range(8):
        scene.advance(TIMEOUT_MS // 8)
        scene.heartbeat("a", a)
        scene.heartbeat("b", b)
    assert scene.reasons == [HandoffEnd.TIMEOUT]
    assert not awaited_by(scene.group, "b", "", "")
    again(scene, (a, owning(0, 1, 2)), (b, owning(2)))
    asked = assigned(scene, {a: given(0, 1), b: given(2)})
    assert asked[b].sync.assignment == given(2), "a source that never lets go is not waited for again"
    assert scene.reasons == [HandoffEnd.TIMEOUT, HandoffEnd.TIMEOUT]
    assert scene.ended[1].waited_ms >= TIMEOUT_MS


def test_the_time_counts_from_the_first_generation() -> None:
    scene = Handing(timeout_ms=6_000)
    a, b, _ = rude(scene)
    scene.advance(4_000)
    again(scene, (a, owning(0, 1, 2)), (b, owning()))
    assert scene.reasons == [HandoffEnd.SUPERSEDED]
    asked = assigned(scene, {a: given(0, 1), b: given(2)})
    scene.advance(1_999)
    assert asked[b].parked
    scene.advance(1)
    assert asked[b].sync.assignment == given(2)
    assert scene.reasons == [HandoffEnd.SUPERSEDED, HandoffEnd.TIMEOUT]


@pytest.mark.parametrize("leaves", [True, False])
def test_target_does_not_wait_for_a_departed_source(leaves: bool) -> None:
    scene = Handing()
    a, b, asked = rude(scene)
    if leaves:
        scene.leave("a", a)
        assert scene.reasons == [HandoffEnd.SOURCE_LEFT]
    else:
        scene.close("a")
        scene.advance(SESSION_MS)
        assert scene.reasons == [HandoffEnd.SOURCE_EXPIRED]
    assert asked[b].error in (REBALANCING, NONE)
    scene.join("b", b, offer=owning())
    assert scene.sync("b", b, {b: given(0, 1, 2)}).sync.assignment == given(0, 1, 2)


def test_a_target_that_leaves_ends_the_wait() -> None:
    scene = Handing()
    a, b, asked = rude(scene)
    scene.leave("b", b)
    assert asked[b].error is UNKNOWN
    assert scene.reasons == [HandoffEnd.TARGET_LEFT]
    scene.join("a", a, offer=owning(0, 1, 2))
    assert scene.sync("a", a, {a: given(0, 1, 2)}).sync.assignment == given(0, 1, 2)
    assert not scene.group.handoffs


def test_a_held_connection_that_closes_leaves_a_member_with_a_session() -> None:
    scene = Handing(group_connection_grace_ms=-1)
    _, b, _ = rude(scene)
    scene.close("b")
    assert b in scene.group.session_deadlines
    assert scene.sync("b2", b).parked
    scene.advance(HOLD_MS)
    assert not scene.group.members[MemberId(b)].parked_sync


def test_source_of_another_wait_is_not_held() -> None:
    scene = Handing()
    a, b = scene.completing("a", "b", offer=owning())
    assigned(scene, {a: given(0, 1), b: given(2, 3)})
    again(scene, (a, owning(0, 1)), (b, owning(2, 3)))
    asked = assigned(scene, {a: given(2, 1), b: given(0, 3)})
    assert [asked[each].error for each in (a, b)] == [NONE, NONE]
    assert awaited_by(scene.group, "a", "", "") == {("t", 2)}
    assert awaited_by(scene.group, "b", "", "") == {("t", 0)}


def test_target_waits_for_an_absent_static_source() -> None:
    """This also applies in an eager group: a member that has not rejoined has not released its partitions."""
    scene = Handing()
    a, b = scene.completing("a", "b", instances={"b": "i"}, offer=owning(name=EAGER))
    scene.sync("b", b, instance="i")
    scene.sync("a", a, {a: given(0, 1), b: given(2)})
    joining = scene.join("c", offer=owning(name=EAGER)).event
    assert isinstance(joining, JoinGroup)
    c = joining.new_member_id
    scene.join("a", a, offer=owning(name=EAGER), rebalance_ms=5_000)
    for _ in range(20):
        scene.advance(3_000)
        scene.heartbeat("b", b, instance="i")
        if scene.state is GroupState.COMPLETING_REBALANCE:
            break
    held = scene.sync("c", c)
    scene.sync("a", a, {a: given(0, 1), c: given(2)})
    assert held.parked
    assert scene.begun[0].source == b
    scene.join("b", b, instance="i", offer=owning(name=EAGER))
    assert held.sync.assignment == given(2)
    assert scene.reasons == [HandoffEnd.ACKNOWLEDGED]


def test_unreadable_assignment_is_not_held() -> None:
    scene = Handing(HandoffMode.DRAIN)
    a, b = scene.completing("a", "b", offer=((STICKY, b"?"),))
    assigned(scene, {a: b"for a", b: b"for b"})
    again(scene, (a, ((STICKY, b"!"),)), (b, ((STICKY, b"?"),)))
    asked = assigned(scene, {a: b"for b", b: b"for a"})
    assert [asked[each].error for each in (a, b)] == [NONE, NONE]


def test_no_member_waits_for_a_deleted_topic() -> None:
    scene = Handing()
    _, b, asked = rude(scene)
    topic = ClusterTopic(UUID(int=1), "t", 3)
    still = CLASSIC.step(scene.group, ClusterChanged(), Cluster({"t": topic}), scene.now_ms, scene.settings)
    assert still.group is scene.group
    assert CLASSIC.watches(scene.group)
    taken = CLASSIC.step(scene.group, ClusterChanged(), Cluster(), scene.now_ms, scene.settings)
    assert [fact.reason for fact in taken.facts if isinstance(fact, HandoffEnded)] == [HandoffEnd.PARTITION_DELETED]
    held = asked[b].event
    assert isinstance(held, SyncGroup)
    assert [request_id for request_id, _ in taken.replies] == [held.request_id]


def test_no_member_waits_for_the_mark_of_a_topic_that_was_created_again() -> None:
    scene = Handing(HandoffMode.DRAIN)
    a, b, asked = moved(scene)
    for topic_id, committed in ((UUID(int=1), 50), (UUID(int=2), -1)):
        assert asked[b].parked
        found = Drained("t", 2, MemberId(a), 100, committed, topic_id=topic_id)
        scene.send_silent(HandoffProgress((found,)))
    assert asked[b].sync.assignment == given(2)
    assert scene.reasons == [HandoffEnd.PARTITION_DELETED]


def taken_over(scene: Handing, after_ms: int, lead_ms: int | None, *, by_an_older_release: bool = False) -> Handing:
    """Return the group as another node reads it. That node's clock is `ahead_ms` ahead; None if the difference is
    unknown.
    """
    rows: dict[MemberId, Document] = {}
    for key in scene.group.members:
        row = stored_member(scene.group, key)
        assert row is not None
        rows[key] = row.document
    kept = replace(stored(scene.group), clock_lead_ms=lead_ms)
    if by_an_older_release:
        handoffs: Any = kept.document["handoffs"]
        waits = [{name: each[name] for name in each if name != "since_ms"} for each in handoffs]
        kept = replace(kept, document={**kept.document, "handoffs": waits})
    successor = Handing()
    successor.now_ms = scene.now_ms + after_ms + (lead_ms or 0)
    successor.group = restore("g", kept, rows, None, successor.now_ms, successor.settings)
    return successor


def test_coordinator_that_is_behind_does_not_take_a_topic_for_deleted() -> None:
    scene = Handing()
    scene.cluster = Cluster(revision=7)
    rude(scene)
    successor = taken_over(scene, 0, 0)
    for revision, waits in ((6, True), (7, False)):
        cluster = Cluster(revision=revision)
        taken = CLASSIC.step(successor.group, ClusterChanged(), cluster, successor.now_ms, successor.settings)
        assert isinstance(taken.group, Group)
        assert bool(taken.group.handoffs) is waits, revision


@pytest.mark.parametrize("lead_ms", [0, 86_400_000, -700_000])
@pytest.mark.parametrize(
    ("after_ms", "left_ms"),
    [
        pytest.param(5_000, TIMEOUT_MS - 5_000, id="some time is left"),
        pytest.param(TIMEOUT_MS - 1, 10_000, id="next to none, but the source must find the new coordinator"),
        pytest.param(10 * TIMEOUT_MS, 10_000, id="nobody coordinated for long"),
        pytest.param(-3_000, TIMEOUT_MS, id="clocks that say that it begins in the future"),
    ],
)
def test_new_coordinator_knows_when_the_wait_began(lead_ms: int, after_ms: int, left_ms: int) -> None:
    scene = Handing()
    rude(scene)
    successor = taken_over(scene, after_ms, lead_ms)
    (handoff,) = successor.group.handoffs
    assert handoff.deadline_ms == successor.now_ms + left_ms
    assert handoff.since_ms == successor.now_ms - max(after_ms, 0)
    again = taken_over(successor, 1_000, lead_ms)
    assert again.group.handoffs[0].since_ms == again.now_ms - max(after_ms, 0) - 1_000, "and so does the next one"


def test_wait_stored_by_an_older_release_begins_at_the_restore() -> None:
    scene = Handing()
    rude(scene)
    successor = taken_over(scene, 5_000, None, by_an_older_release=True)
    (handoff,) = successor.group.handoffs
    assert (handoff.since_ms, handoff.deadline_ms) == (successor.now_ms, successor.now_ms + TIMEOUT_MS)


def test_new_coordinator_continues_the_wait() -> None:
    scene = Handing()
    a, b, _ = rude(scene)
    successor = taken_over(scene, 0, None)
    held = successor.sync("b", b)
    assert held.parked
    assert awaited_by(successor.group, "b", "", "") == {("t", 2)}
    successor.join("a", a, offer=owning(0, 1))
    assert held.error is REBALANCING
    successor.join("b", b, offer=owning())
    assert successor.reasons == [HandoffEnd.ACKNOWLEDGED]


# --- draining ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [EAGER, STICKY])
def test_a_target_is_held_until_the_source_has_committed_what_it_was_served(name: str) -> None:
    scene = Handing(HandoffMode.DRAIN)
    a, b, asked = moved(scene, name)
    assert asked[a].sync.assignment == given(0, 1)
    assert asked[b].parked
    assert [(each.source, each.partition) for each in draining(scene.group)] == [(a, 2)]
    scene.drained(a, 2, mark=10, committed=4)
    scene.drained(a, 2, mark=10, committed=9)
    assert asked[b].parked
    assert scene.commit("a", a).error is NONE, "the source commits in the generation that took the partition from it"
    scene.drained(a, 2, mark=10, committed=10)
    assert asked[b].sync.assignment == given(2)
    assert scene.reasons == [HandoffEnd.DRAINED]
    assert scene.ended[0].mark == 10


@pytest.mark.parametrize("name", [EAGER, STICKY])
def test_target_does_not_wait_for_partitions_its_source_does_not_process(name: str) -> None:
    scene = Handing(HandoffMode.DRAIN)
    a, b, asked = moved(scene, name)
    scene.drained(a, 2, mark=10, committed=4)
    assert asked[b].parked
    scene.send_silent(HandoffProgress((Drained("t", 2, MemberId(a), 10, 4, stopped=True),)))
    assert asked[b].sync.assignment == given(2)
    assert scene.reasons == [HandoffEnd.PROCESSED]


@pytest.mark.parametrize("phase", ["join", "sync"])
def test_target_does_not_wait_for_a_process_that_was_replaced_during_the_rebalance(phase: str) -> None:
    """The new process of the static member was served nothing, so it cannot commit what the old one was served."""
    scene = Handing(HandoffMode.DRAIN)
    a, b = scene.completing("a", "b", instances={"a": "i"}, offer=owning(name=EAGER))
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0, 1, 2), b: given()}, instance="i")
    scene.join("b", b, offer=owning(name=EAGER) * 2)
    if phase == "sync":
        scene.join("a", a, instance="i", offer=owning(name=EAGER))
        assert scene.state is GroupState.COMPLETING_REBALANCE
    returned = scene.join("a2", instance="i", offer=owning(name=EAGER))
    if phase == "sync":
        scene.join("b", b, offer=owning(name=EAGER))
    assert scene.state is GroupState.COMPLETING_REBALANCE
    a2 = returned.join.member_id
    shares = {a2: given(0, 1), b: given(2)}
    leader = scene.group.leader_id
    connections = {a2: ("a2", "i"), b: ("b", None)}
    asked: dict[str, Asked] = {}
    for member_id in sorted(shares, key=lambda each: each == leader):
        connection, instance = connections[member_id]
        asked[member_id] = scene.sync(connection, member_id, shares if member_id == leader else None, instance=instance)
    assert asked[b].sync.assignment == given(2)
    assert not draining(scene.group)


def test_begin_of_the_revocation_is_known() -> None:
    scene = Handing(HandoffMode.DRAIN)
    moved(scene, STICKY)
    assigned_ms = scene.now_ms
    scene.advance(100)
    assert [(each.asked_ms, each.asked_by_rebalance) for each in draining(scene.group)] == [(assigned_ms, False)]
    scene = Handing(HandoffMode.DRAIN)
    moved(scene, EAGER)
    assert [each.asked_by_rebalance for each in draining(scene.group)] == [True]


def test_commit_of_the_last_generation_counts_while_a_target_waits() -> None:
    scene = Handing(HandoffMode.DRAIN)
    a, b, _ = moved(scene)
    generation = scene.group.generation_id
    late = scene.commit("a", a, generation=generation - 1).reply
    assert isinstance(late, OffsetCommitReply)
    assert (late.error, late.member_epoch) == (NONE, generation), "fenced by the group's generation, which is the next"
    assert scene.commit("a", a, generation=generation - 2).error is ErrorCode.ILLEGAL_GENERATION
    assert scene.commit("b", b, generation=generation - 1).error is ErrorCode.ILLEGAL_GENERATION
    scene.drained(a, 2, mark=10, committed=10)
    assert scene.commit("a", a, generation=generation - 1).error is ErrorCode.ILLEGAL_GENERATION


def test_commit_of_the_last_generation_counts_after_the_leader_takes_the_partition_from_its_waiting_target() -> None:
    scene = Handing(HandoffMode.DRAIN)
    a, b, c = scene.completing("a", "b", "c", offer=owning())
    assigned(scene, {a: given(0, 1, 2), b: given(), c: given()})
    again(scene, (a, owning(0, 1, 2)), (b, owning()), (c, owning()))
    assigned(scene, {a: given(0, 1), b: given(2), c: given()})
    scene.advance(HOLD_MS)
    again(scene, (a, owning(0, 1)), (b, owning(2)), (c, owning()))
    assigned(scene, {a: given(0, 1), b: given(), c: given(2)})
    generation = scene.group.generation_id
    assert [(each.source, each.behind) for each in scene.group.handoffs] == [(b, a)]
    assert scene.commit("a", a, generation=generation - 1).error is NONE
    assert scene.commit("b", b, generation=generation - 1).error is ErrorCode.ILLEGAL_GENERATION, "it has read nothing"


def test_commit_of_the_last_generation_is_refused_after_the_wait() -> None:
    scene = Handing(HandoffMode.DRAIN, timeout_ms=HOLD_MS)
    a, _, _ = moved(scene)
    scene.advance(HOLD_MS)
    assert scene.reasons == [HandoffEnd.TIMEOUT]
    late = scene.commit("a", a, generation=scene.group.generation_id - 1)
    assert late.error is ErrorCode.ILLEGAL_GENERATION


def test_a_mark_never_falls() -> None:
    """A source that fetches from an earlier offset, or reports one, has processed no more records."""
    scene = Handing(HandoffMode.DRAIN)
    a, b, asked = moved(scene)
    scene.drained(a, 2, mark=10, committed=4)
    scene.drained(a, 2, mark=3, committed=4)
    assert asked[b].parked
    scene.drained(a, 2, mark=None, committed=4)
    assert asked[b].parked


def test_target_does_not_wait_for_records_never_served() -> None:
    scene = Handing(HandoffMode.DRAIN)
    a, b, asked = moved(scene)
    scene.drained(a, 2, mark=None, committed=-1)
    assert asked[b].sync.assignment == given(2)
    assert scene.reasons == [HandoffEnd.NEVER_FETCHED]


def test_report_of_another_source_is_ignored() -> None:
    scene = Handing(HandoffMode.DRAIN)
    _, b, asked = moved(scene)
    before = scene.group
    scene.drained(b, 2, mark=1, committed=10)
    assert scene.group is before
    assert asked[b].parked


@pytest.mark.parametrize("given_back", [False, True])
def test_drain_continues_after_the_leader_takes_the_partition_from_its_waiting_target(given_back: bool) -> None:
    """The target has read nothing, so the first owner's commits remain to be awaited."""
    scene = Handing(HandoffMode.DRAIN)
    a, b, c = scene.completing("a", "b", "c", offer=owning())
    assigned(scene, {a: given(0, 1, 2), b: given(), c: given()})
    again(scene, (a, owning(0, 1, 2)), (b, owning()), (c, owning()))
    assigned(scene, {a: given(0, 1), b: given(2), c: given()})
    scene.advance(HOLD_MS)
    again(scene, (a, owning(0, 1)), (b, owning(2)), (c, owning()))
    shares = {a: given(0, 1), b: given(), c: given(2)}
    asked = assigned(scene, {a: given(0, 1, 2), b: given(), c: given()} if given_back else shares)
    assert asked[a if given_back else c].parked
    assert ("t", 2) in awaited_by(scene.group, "b", "", "")
    again(scene, (a, owning(0, 1)), (b, owning()), (c, owning()))
    asked = assigned(scene, shares)
    assert asked[c].parked
    assert [(each.source, each.partition) for each in draining(scene.group)] == [(a, 2)]
    scene.drained(a, 2, mark=10, committed=10)
    assert asked[c].sync.assignment == given(2)


def test_drain_continues_after_its_waiting_target_has_lost_the_partition_and_left() -> None:
    scene = Handing(HandoffMode.DRAIN)
    a, b, c = scene.completing("a", "b", "c", offer=owning())
    assigned(scene, {a: given(0, 1, 2), b: given(), c: given()})
    again(scene, (a, owning(0, 1, 2)), (b, owning()), (c, owning()))
    assigned(scene, {a: given(0, 1), b: given(2), c: given()})
    scene.advance(HOLD_MS)
    again(scene, (a, owning(0, 1)), (b, owning(2)), (c, owning()))
    assigned(scene, {a: given(0, 1), b: given(), c: given(2)})
    scene.leave("b", b)
    scene.join("a", a, offer=owning(0, 1))
    scene.join("c", c, offer=owning())
    held = scene.sync("c", c)
    scene.sync("a", a, {a: given(0, 1), c: given(2)})
    assert held.parked
    assert [(each.source, each.partition) for each in draining(scene.group)] == [(a, 2)]


def test_members_that_swap_partitions_do_not_wait_for_each_other() -> None:
    scene = Handing(HandoffMode.DRAIN)
    a, b = scene.completing("a", "b", offer=owning(name=EAGER))
    assigned(scene, {a: given(0), b: given(1)})
    again(scene, (a, owning(name=EAGER)), (b, owning(name=EAGER)))
    asked = assigned(scene, {a: given(1), b: given(0)})
    assert [asked[each].error for each in (a, b)] == [NONE, NONE]
    assert awaited_by(scene.group, "a", "", "") == {("t", 1)}
    scene.drained(b, 1, mark=5, committed=5)
    assert not awaited_by(scene.group, "a", "", "")
    assert awaited_by(scene.group, "b", "", "") == {("t", 0)}


def test_member_that_has_drained_before_its_sync_is_held() -> None:
    """Two members swap partitions. One has committed everything when its SyncGroup arrives."""
    scene = Handing(HandoffMode.DRAIN)
    a, b = scene.completing("a", "b", offer=owning(name=EAGER))
    assigned(scene, {a: given(0), b: given(1)})
    again(scene, (a, owning(name=EAGER)), (b, owning(name=EAGER)))
    scene.sync("a", a, {a: given(1), b: given(0)})
    scene.drained(b, 1, mark=10, committed=10)
    held = scene.sync("b", b)
    assert held.parked
    scene.drained(a, 0, mark=10, committed=10)
    assert held.sync.assignment == given(0)


def test_handoffs_between_very_many_pairs_of_members_begin_quickly() -> None:
    scene = Handing(HandoffMode.DRAIN, delay_ms=3_000)
    count, offer = 100, owning(name=EAGER)
    joins = {f"c{place}": scene.join(f"c{place}", offer=offer) for place in range(count)}
    scene.advance(6_000)
    ids = {connection: joined.join.member_id for connection, joined in joins.items()}

    def seconds_to_assign(owner_of: Callable[[int], int]) -> float:
        shares = {
            str(member_id): given(*(partition for partition in range(count**2) if owner_of(partition) == place))
            for place, member_id in enumerate(ids.values())
        }
        (leader,) = (connection for connection, member_id in ids.items() if member_id == scene.group.leader_id)
        for connection in ids.keys() - {leader}:
            scene.sync(connection, ids[connection])
        started = time.process_time()
        assert scene.sync(leader, ids[leader], shares).error is NONE
        return time.process_time() - started

    seconds_to_assign(lambda partition: partition % count)
    for connection, member_id in ids.items():
        scene.join(connection, member_id, offer=offer)
    assert seconds_to_assign(lambda partition: partition // count) < 2, "a look at all handoffs for each pair takes six"
    assert len(scene.begun) == count * (count - 1)


def test_pending_drain_survives_a_rebalance() -> None:
    scene = Handing(HandoffMode.DRAIN)
    a, b, asked = moved(scene)
    again(scene, (a, owning(name=EAGER)), (b, owning(name=EAGER)))
    assert asked[b].error is REBALANCING
    asked = assigned(scene, {a: given(0, 1), b: given(2)})
    assert asked[b].parked
    scene.drained(a, 2, mark=5, committed=5)
    assert asked[b].sync.assignment == given(2)
    assert scene.reasons == [HandoffEnd.SUPERSEDED, HandoffEnd.DRAINED]


def test_no_member_waits_for_a_partition_that_returns_to_its_source() -> None:
    scene = Handing(HandoffMode.DRAIN)
    a, b, _ = moved(scene)
    again(scene, (a, owning(name=EAGER)), (b, owning(name=EAGER)))
    asked = assigned(scene, {a: given(0, 1, 2), b: given()})
    assert [asked[each].error for each in (a, b)] == [NONE, NONE]
    assert not scene.group.handoffs


def test_client_without_stable_fetch_is_not_held() -> None:
    scene = Handing(HandoffMode.DRAIN)
    _, b, _ = moved(scene)
    scene.advance(HOLD_MS)
    scene.send_silent(HandoffProgress(passed=((MemberId(b), "t", 2),)))
    assert scene.reasons == [HandoffEnd.CLIENT_CAP]
    assert not awaited_by(scene.group, "b", "", "")


# --- members that fetch offsets ---------------------------------------------------------------------------------------


def test_only_the_targets_offset_fetch_is_unstable() -> None:
    scene = Handing(HandoffMode.DRAIN)
    moved(scene)
    assert awaited_by(scene.group, "b", "client", "/127.0.0.1") == {("t", 2)}
    assert not awaited_by(scene.group, "a", "client", "/127.0.0.1"), "the source may ask what it has committed"
    assert awaited_by(scene.group, "another", "client", "/127.0.0.1") == {("t", 2)}, "clients may ask elsewhere"
    assert not awaited_by(scene.group, "another", "admin", "/127.0.0.1")
    assert not awaited_by(scene.group, "another", "client", "/10.0.0.1")
