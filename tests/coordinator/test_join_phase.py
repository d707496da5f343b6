"""The duration of the join phase: when it ends, and for which members it waits."""

from __future__ import annotations

import pytest

from gateway.coordinator.classic.machine import next_deadline
from gateway.coordinator.classic.model import GroupState
from protocol.errors import ErrorCode

from .invariants import must_store
from .scene import REBALANCE_MS, SESSION_MS, Scene, protocols

NONE = ErrorCode.NONE
EMPTY = GroupState.EMPTY
PREPARING = GroupState.PREPARING_REBALANCE
COMPLETING = GroupState.COMPLETING_REBALANCE
STABLE = GroupState.STABLE


def test_the_first_join_of_an_empty_group_waits_out_the_initial_delay() -> None:
    scene = Scene(delay_ms=3000)
    held = scene.join("a")
    scene.advance(2_999)
    assert held.parked
    scene.advance(1)
    assert held.join.generation_id == 1


def test_each_newcomer_prolongs_the_initial_delay_by_one_delay() -> None:
    scene = Scene(delay_ms=3000)
    first = scene.join("a")
    scene.advance(2_000)
    second = scene.join("b")
    scene.advance(1_000)
    scene.advance(2_000)
    third = scene.join("c")
    scene.advance(1_000)
    assert first.parked
    scene.advance(3_000)
    assert [asked.join.generation_id for asked in (first, second, third)] == [1, 1, 1]
    assert len(first.join.members) == 3


def test_prolonging_ends_with_the_rebalance_timeout() -> None:
    scene = Scene(delay_ms=3000)
    first = scene.join("a", rebalance_ms=7_000)
    for at in range(6):
        scene.join(f"b{at}", rebalance_ms=7_000)
        scene.advance(1_000)
        assert first.parked
    scene.join("late", rebalance_ms=7_000)
    scene.advance(999)
    assert first.parked
    scene.advance(1)
    assert len(first.join.members) == 8


def test_pending_member_delays_a_later_rebalance_until_it_joins() -> None:
    scene = Scene()
    (a,) = scene.stable("a")
    pending = scene.join("b", version=4).join.member_id
    assert scene.state is STABLE
    held = scene.join("a", a)
    assert held.parked
    assert scene.join("b", pending, version=4).error is NONE
    assert len(held.join.members) == 2


def test_pending_member_delays_a_later_rebalance_until_it_expires() -> None:
    scene = Scene()
    (a,) = scene.stable("a")
    scene.join("b", version=4, session_ms=6_000)
    held = scene.join("a", a)
    scene.advance(5_999)
    assert held.parked
    scene.advance(1)
    assert len(held.join.members) == 1
    assert not scene.group.pending


def test_pending_member_does_not_prolong_the_initial_delay() -> None:
    scene = Scene(delay_ms=3000)
    held = scene.join("a")
    pending = scene.join("b", version=4).join.member_id
    scene.advance(3000)
    assert held.error is NONE
    assert pending in scene.group.pending


def test_a_laggard_is_removed_and_starts_a_new_generation_later() -> None:
    scene = Scene()
    a, b = scene.stable("a", "b")
    held = scene.join("a", a)
    for _ in range(REBALANCE_MS // 5_000):
        assert scene.heartbeat("b", b).error is ErrorCode.REBALANCE_IN_PROGRESS
        scene.advance(5_000)
    assert [member.member_id for member in held.join.members] == [a]
    assert scene.join("b", b).error is ErrorCode.UNKNOWN_MEMBER_ID
    scene.join("b")
    scene.join("a", a)
    assert (scene.generation, len(scene.group.members)) == (4, 2)


def test_a_tick_on_an_empty_group_does_nothing() -> None:
    """An early, late or repeated Tick does not change the result either."""
    scene = Scene()
    (a,) = scene.stable("a")
    before = scene.group
    scene.tick()
    assert scene.group is before
    scene.leave("a", a)
    before = scene.group
    scene.now_ms += 10_000_000
    scene.tick()
    assert scene.group is before
    assert next_deadline(scene.group) is None


def test_join_phase_of_absent_static_members_continues_until_they_expire() -> None:
    """Dynamic members that are late are removed, and static ones stay. Without a leader the phase begins again."""
    scene = Scene()
    instances = {"a": "ia", "b": "ib"}
    _, _, c = scene.stable("a", "b", "c", instances=instances)
    for member_id in list(scene.group.members):
        scene.group = scene.group.with_session_deadline(member_id, scene.now_ms + 150_000)
    scene.leave("c", c)
    assert scene.state is PREPARING
    scene.advance(REBALANCE_MS)
    assert scene.state is PREPARING
    assert scene.group.phase_deadline_ms == scene.now_ms + REBALANCE_MS
    scene.advance(150_000 - REBALANCE_MS - 1)
    assert scene.state is PREPARING
    assert len(scene.group.members) == 2
    scene.advance(1)
    assert scene.state is EMPTY


def test_join_phase_of_absent_static_members_begins_again_once_a_second_at_most() -> None:
    """Each time costs a step. A client may choose a rebalance timeout of 1 ms, and a session of half an hour."""
    scene = Scene()
    a = scene.join("a", instance="ia", rebalance_ms=1).join.member_id
    scene.sync("a", a, {a: b""}, instance="ia")
    scene.join("b", rebalance_ms=1)
    _, b = scene.group.members
    scene.leave("b", b)
    scene.advance(1)
    assert scene.state is PREPARING
    assert scene.group.phase_deadline_ms == scene.now_ms + 1_000


def test_the_generation_rises_by_one_with_each_rebalance() -> None:
    """The generation rises only when the join phase ends."""
    scene = Scene()
    a, b = scene.stable("a", "b")
    before = scene.generation
    scene.join("a", a)
    assert scene.generation == before
    scene.join("b", b)
    assert scene.generation == before + 1


def test_a_silent_member_is_removed_exactly_at_its_session_timeout() -> None:
    scene = Scene()
    a, b = scene.stable("a", "b")
    scene.advance(SESSION_MS - 1)
    scene.heartbeat("a", a)
    assert b in scene.group.members
    scene.advance(1)
    assert b not in scene.group.members
    assert scene.state is PREPARING


def test_heartbeats_keep_a_session() -> None:
    scene = Scene()
    (a,) = scene.stable("a")
    for _ in range(10):
        scene.advance(SESSION_MS - 1)
        assert scene.heartbeat("a", a).error is NONE
    assert scene.state is STABLE


def test_a_session_that_ends_while_the_join_is_held_counts_as_alive() -> None:
    """The other members may use their whole rebalance timeout."""
    scene = Scene()
    a, b = scene.stable("a", "b")
    held = scene.join("a", a)
    for _ in range(5):
        scene.advance(SESSION_MS - 1)
        scene.heartbeat("b", b)
    assert a not in scene.group.session_deadlines
    assert held.parked
    scene.join("b", b)
    assert held.error is NONE
    assert scene.group.session_deadlines[scene.member(a).member_id] == scene.now_ms + SESSION_MS


def test_expired_member_no_longer_delays_the_join_phase() -> None:
    scene = Scene()
    a, _ = scene.stable("a", "b")
    held = scene.join("a", a)
    scene.advance(SESSION_MS)
    assert [member.member_id for member in held.join.members] == [a]


def test_a_late_tick_does_what_is_due_in_order() -> None:
    """The order is: pending ids, members, then the join phase. One generation follows, and no held request is lost."""
    scene = Scene()
    a, b, c = scene.stable("a", "b", "c")
    scene.join("p", version=4)
    held = scene.join("a", a)
    scene.now_ms += 10 * REBALANCE_MS
    scene.tick()
    assert not scene.group.pending
    assert [member.member_id for member in held.join.members] == [a]
    assert scene.generation == 4
    assert b not in scene.group.members
    assert c not in scene.group.members


def test_a_late_tick_ends_a_phase_once() -> None:
    """A pending id and an absent static member are overdue together. No join is answered before both are removed."""
    scene = Scene()
    a, b = scene.stable("a", "b", instances={"b": "ib"})
    scene.join("p", version=4, session_ms=6_000)
    held = scene.join("a", a)
    scene.now_ms += SESSION_MS
    scene.tick()
    assert [member.member_id for member in held.join.members] == [a]
    assert b not in scene.group.members
    assert scene.state is COMPLETING


@pytest.mark.parametrize("late_ms", [0, 5_000])
def test_several_members_that_expire_together_cost_one_rebalance(late_ms: int) -> None:
    scene = Scene()
    a, *_ = scene.stable("a", "b", "c", "d")
    before = scene.generation
    scene.now_ms += SESSION_MS - 1
    scene.heartbeat("a", a)
    scene.now_ms += 1 + late_ms
    scene.tick()
    assert list(scene.group.members) == [a]
    assert scene.generation == before
    assert scene.join("a", a).join.generation_id == before + 1


def test_vote_prefers_the_most_preferred_common_protocol() -> None:
    """Not every member lists `sticky`, and `roundrobin` has two votes of three."""
    scene = Scene(delay_ms=100)
    joins = [
        scene.join("a", offer=protocols("range", "roundrobin")),
        scene.join("b", offer=protocols("sticky", "roundrobin", "range")),
        scene.join("c", offer=protocols("roundrobin", "range")),
    ]
    scene.advance(1_000)
    assert {asked.join.protocol_name for asked in joins} == {"roundrobin"}


def test_the_leader_sees_the_metadata_of_the_chosen_protocol() -> None:
    scene = Scene(delay_ms=100)
    first = scene.join("a", offer=(("x", b"ax"), ("y", b"ay")))
    scene.join("b", offer=(("z", b"bz"), ("y", b"by")))
    scene.advance(1_000)
    assert [member.metadata for member in first.join.members] == [b"ay", b"by"]


def test_a_leader_that_rejoins_stays_leader_and_one_that_does_not_is_replaced() -> None:
    scene = Scene()
    a, b, c = scene.stable("a", "b", "c")
    scene.join("c", c, offer=protocols("range", topics=("u",)))
    scene.join("b", b)
    assert scene.join("a", a).join.leader == a
    scene.sync_all("abc", [a, b, c])
    scene.join("c", c, offer=protocols("range"))
    joined = scene.join("b", b)
    for _ in range(REBALANCE_MS // 5_000):
        scene.heartbeat("a", a)
        scene.advance(5_000)
    assert joined.join.leader == b


def test_group_is_empty_if_all_members_leave_in_the_initial_delay() -> None:
    scene = Scene(delay_ms=3000)
    held = scene.join("a")
    scene.leave("a2", next(iter(scene.group.members)))
    assert held.error is ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.state is PREPARING
    scene.advance(3000)
    assert scene.state is EMPTY
    assert must_store(scene.last)
    assert scene.join("b").parked


def test_a_pending_id_alone_does_not_keep_an_abandoned_group_preparing() -> None:
    scene = Scene()
    (a,) = scene.stable("a")
    pending = scene.join("p", version=4).join.member_id
    scene.leave("a", a)
    assert scene.state is EMPTY
    assert scene.join("p", pending, version=4).error is NONE


def test_completing_ends_with_the_longest_rebalance_timeout() -> None:
    scene = Scene(delay_ms=100)
    scene.join("a", rebalance_ms=20_000)
    scene.join("b", rebalance_ms=70_000)
    scene.advance(200)
    assert scene.state is COMPLETING
    assert scene.group.phase_deadline_ms == scene.now_ms + 70_000
