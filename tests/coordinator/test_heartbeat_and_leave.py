"""Heartbeat, LeaveGroup, DescribeGroups and DeleteGroups."""

from __future__ import annotations

import time

from gateway.coordinator.classic.machine import CLASSIC, describe, restore, stored, stored_member
from gateway.coordinator.classic.model import Group, GroupState, Member
from gateway.coordinator.classic.views import offset_delete_refusal, subscribes_to
from gateway.coordinator.cluster import NO_TOPICS
from gateway.coordinator.facts import MemberId, MemberSilent
from gateway.coordinator.machine import ConnectionId, RequestId
from gateway.coordinator.requests import LeaveGroup, LeavingMember
from gateway.coordinator.settings import Settings
from protocol.errors import ErrorCode

from .invariants import must_store
from .scene import RANGE, REBALANCE_MS, SESSION_MS, Scene, protocols

NONE = ErrorCode.NONE
UNKNOWN = ErrorCode.UNKNOWN_MEMBER_ID
FENCED = ErrorCode.FENCED_INSTANCE_ID
REBALANCING = ErrorCode.REBALANCE_IN_PROGRESS
PREPARING = GroupState.PREPARING_REBALANCE
COMPLETING = GroupState.COMPLETING_REBALANCE
STABLE = GroupState.STABLE
EMPTY = GroupState.EMPTY


def test_heartbeat_of_an_unknown_member_changes_nothing() -> None:
    assert Scene().heartbeat("a", "ghost").error is UNKNOWN
    scene = Scene()
    (a,) = scene.stable("a")
    before = scene.group
    assert scene.heartbeat("a", "ghost").error is UNKNOWN
    assert scene.heartbeat("a", a, generation=0).error is ErrorCode.ILLEGAL_GENERATION
    assert scene.heartbeat("a", a, generation=2).error is ErrorCode.ILLEGAL_GENERATION
    assert scene.group is before
    assert scene.heartbeat("a", a).error is NONE


def test_a_pending_member_has_no_heartbeat() -> None:
    scene = Scene()
    scene.stable("a")
    pending = scene.join("b", version=4).join.member_id
    assert scene.heartbeat("b", pending).error is UNKNOWN


def test_heartbeat_reports_a_rebalance_only_while_it_prepares() -> None:
    """The heartbeat also extends the session, in either state."""
    scene = Scene()
    a, b = scene.stable("a", "b")
    scene.join("a", a)
    scene.now_ms += 5_000
    assert scene.heartbeat("b", b).error is REBALANCING
    assert scene.group.session_deadlines[scene.member(b).member_id] == scene.now_ms + 10_000
    scene.join("b", b)
    assert scene.state is COMPLETING
    scene.now_ms += 5_000
    assert scene.heartbeat("b", b).error is NONE
    assert scene.group.session_deadlines[scene.member(b).member_id] == scene.now_ms + 10_000


def test_the_heartbeat_of_a_replaced_static_member_is_fenced() -> None:
    scene = Scene()
    (a,) = scene.stable("a", instances={"a": "ia"})
    scene.join("a2", instance="ia", version=5)
    assert scene.heartbeat("a", a, instance="ia").error is FENCED
    assert scene.heartbeat("a", a).error is UNKNOWN


def test_missed_heartbeat_is_reported() -> None:
    scene = Scene()
    (a,) = scene.stable("a")
    late_ms = SESSION_MS * 2 // 3 + 1
    scene.now_ms += late_ms - 1
    scene.heartbeat("a", a)
    assert not scene.last.facts, "two heartbeats to a session are enough"
    scene.now_ms += late_ms
    scene.heartbeat("a", a)
    assert scene.last.facts == (MemberSilent(MemberId(a), late_ms),)
    assert not must_store(scene.last)
    assert not scene.last.facts[0].touches(), "nothing stored of the member has changed"
    scene.heartbeat("a", a)
    assert not scene.last.facts
    scene.now_ms += late_ms
    scene.commit("a", a)
    assert scene.last.facts == (MemberSilent(MemberId(a), late_ms),), "a commit is a sign of life, too"
    scene.now_ms += late_ms
    scene.heartbeat("elsewhere", a)
    assert MemberSilent(MemberId(a), late_ms) in scene.last.facts, "on another connection"
    scene.now_ms += late_ms
    scene.heartbeat("a", a, generation=scene.generation - 1)
    assert not scene.last.facts, "who is refused has not been heard"


def test_lost_time_or_a_held_join_does_not_count_as_silence() -> None:
    scene = Scene()
    a, b = scene.stable("a", "b")
    scene.group = CLASSIC.postponed(scene.group, SESSION_MS)
    scene.now_ms += SESSION_MS
    scene.heartbeat("a", a)
    assert not scene.last.facts, "time stood still"
    scene.join("a", a, offer=protocols("range", topics=("u",)))
    scene.now_ms += SESSION_MS * 3 // 4
    scene.heartbeat("a", a)
    assert not scene.last.facts, "its join is held"
    again = Scene()
    rows = {key: row.document for key in scene.group.members if (row := stored_member(scene.group, key))}
    again.group = restore("g", stored(scene.group), rows, SESSION_MS // 10, again.now_ms, again.settings)
    again.now_ms += SESSION_MS * 3 // 4
    again.heartbeat("b2", b)
    assert not again.last.facts, "it has just found the new coordinator"


def test_leaving_a_missing_group_is_unknown_for_each() -> None:
    scene = Scene()
    before = scene.group
    asked = scene.leave("a", "m", ("", "ia"), ("", None))
    assert (asked.error, asked.codes) == (NONE, [UNKNOWN] * 3)
    assert scene.group is before


def test_leaving_a_dead_group() -> None:
    scene = Scene(Group("g", GroupState.DEAD))
    assert scene.leave("a", "m").error is ErrorCode.COORDINATOR_NOT_AVAILABLE


def test_the_last_member_that_leaves_empties_the_group() -> None:
    scene = Scene()
    (a,) = scene.stable("a")
    assert scene.leave("a", a).codes == [NONE]
    assert (scene.state, scene.generation, scene.group.protocol_name) == (EMPTY, 2, None)
    assert must_store(scene.last)


def test_leave_checks_the_instance() -> None:
    scene = Scene()
    a, _ = scene.stable("a", "b", instances={"a": "ia"})
    before = scene.group
    assert scene.leave("x", ("other", "ia"), (a, "ib"), ("", "ib")).codes == [FENCED, UNKNOWN, UNKNOWN]
    assert scene.group is before
    assert scene.leave("x", ("", "ia")).codes == [NONE]
    assert a not in scene.group.members


def test_a_batch_has_a_code_for_each_and_one_rebalance() -> None:
    """A member that is named twice is already removed at the second mention."""
    scene = Scene()
    instances = {"a": "ia", "b": "ib"}
    a, b, c, d = scene.stable("a", "b", "c", "d", instances=instances)
    pending = scene.join("p", version=4).join.member_id
    before = scene.generation
    asked = scene.leave("x", (a, "ia"), ("wrong", "ib"), ("", "ix"), pending, c, c, "ghost")
    assert asked.codes == [NONE, FENCED, UNKNOWN, NONE, NONE, UNKNOWN, UNKNOWN]
    assert [(each.member_id, each.group_instance_id) for each in asked.reply.members][1] == ("wrong", "ib")  # type: ignore[union-attr]
    assert (scene.state, list(scene.group.members), scene.generation) == (PREPARING, [b, d], before)
    scene.join("b", b, instance="ib")
    assert scene.join("d", d).join.generation_id == before + 1


def test_a_long_batch_is_quick_in_a_group_of_many_static_members() -> None:
    members = {
        member_id: Member(member_id, f"i{number}", "client", "/127.0.0.1", SESSION_MS, REBALANCE_MS, RANGE)
        for number in range(10_000)
        for member_id in (MemberId(f"m{number}"),)
    }
    group = Group("g", STABLE, exists=True, members=members)
    unknown = tuple(LeavingMember(MemberId(""), f"unknown {number}") for number in range(5_000))
    started = time.process_time()
    taken = CLASSIC.step(group, LeaveGroup(RequestId(1), ConnectionId("x"), unknown), NO_TOPICS, 0, Settings())
    assert time.process_time() - started < 1, "seconds: a look at every member for each entry takes two"
    assert taken.group is group


def test_a_pending_member_that_leaves_a_stable_group_is_no_rebalance() -> None:
    scene = Scene()
    scene.stable("a")
    pending = scene.join("p", version=4).join.member_id
    assert scene.leave("p", pending).codes == [NONE]
    assert (scene.state, dict(scene.group.pending)) == (STABLE, {})


def test_a_pending_member_that_leaves_lets_the_barrier_fall() -> None:
    scene = Scene()
    (a,) = scene.stable("a")
    pending = scene.join("p", version=4).join.member_id
    held = scene.join("a", a)
    scene.leave("p", pending)
    assert held.error is NONE


def test_a_member_that_leaves_while_its_join_is_held_is_answered() -> None:
    scene = Scene()
    a, b = scene.stable("a", "b")
    held = scene.join("b", b, offer=protocols("range", topics=("u",)))
    scene.leave("x", b)
    assert held.error is UNKNOWN
    assert scene.join("a", a).error is NONE


def test_only_a_stable_group_shows_metadata() -> None:
    """Assignments are shown exactly as they are stored."""
    scene = Scene()
    a, b = scene.completing("a", "b")
    shown = describe(scene.group)
    assert (shown.state, shown.protocol_type, shown.protocol_data) == ("CompletingRebalance", "consumer", "")
    assert [member.metadata for member in shown.members] == [b"", b""]
    scene.sync_all("ab", [a, b])
    shown = describe(scene.group)
    assert (shown.state, shown.protocol_data) == ("Stable", "range")
    assert [member.assignment for member in shown.members] == [b"for a", b"for b"]
    assert all(member.metadata for member in shown.members)
    assert {member.client_id for member in shown.members} == {"client"}
    scene.join("a", a)
    assert describe(scene.group).state == "PreparingRebalance"


def test_a_missing_group_is_shown_as_dead() -> None:
    shown = describe(Group("g"))
    assert (shown.state, shown.protocol_type, shown.members) == ("Dead", "", ())


def test_only_an_empty_group_can_be_deleted() -> None:
    scene = Scene()
    assert scene.delete().error is ErrorCode.GROUP_ID_NOT_FOUND
    (a,) = scene.stable("a")
    before = scene.group
    assert scene.delete().error is ErrorCode.NON_EMPTY_GROUP
    assert scene.group is before
    scene.leave("a", a)
    assert scene.delete().error is NONE
    assert (scene.state, must_store(scene.last), scene.group.exists) == (GroupState.DEAD, True, False)
    assert scene.delete().error is ErrorCode.GROUP_ID_NOT_FOUND


def test_pending_ids_go_with_a_deleted_group() -> None:
    scene = Scene()
    pending = scene.join("a", version=4).join.member_id
    assert scene.delete().error is NONE
    scene.group = Group("g")
    assert scene.join("a", pending, version=4).error is UNKNOWN


def test_offsets_of_subscribed_topics_are_kept() -> None:
    assert offset_delete_refusal(CLASSIC.summary(Group("g"))) is ErrorCode.GROUP_ID_NOT_FOUND
    scene = Scene()
    (a,) = scene.stable("a", offer=protocols("range", topics=("t", "u")))
    assert offset_delete_refusal(CLASSIC.summary(scene.group)) is None
    assert [subscribes_to(CLASSIC.summary(scene.group), topic) for topic in "tuv"] == [True, True, False]
    scene.leave("a", a)
    assert offset_delete_refusal(CLASSIC.summary(scene.group)) is None
    assert not subscribes_to(CLASSIC.summary(scene.group), "t")


def test_a_group_whose_subscriptions_cannot_be_read_keeps_all_offsets() -> None:
    scene = Scene()
    scene.stable("a", offer=(("range", b"\xff"),))
    assert scene.group.subscribed_topics is None
    assert subscribes_to(CLASSIC.summary(scene.group), "anything")
    scene = Scene()
    scene.join("a", protocol_type="connect", offer=(("default", b""),))
    assert offset_delete_refusal(CLASSIC.summary(scene.group)) is ErrorCode.NON_EMPTY_GROUP
