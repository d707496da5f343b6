"""Effects of a closed connection: dropped requests, the grace period, failed members."""

from __future__ import annotations

import pytest

from gateway.coordinator.classic.model import GroupState
from protocol.errors import ErrorCode

from .scene import REBALANCE_MS, SESSION_MS, Scene

NONE = ErrorCode.NONE
PREPARING = GroupState.PREPARING_REBALANCE
STABLE = GroupState.STABLE


def long_sessions(scene: Scene) -> None:
    for member_id in list(scene.group.members):
        scene.group = scene.group.with_session_deadline(member_id, scene.now_ms + 1_000_000)


def test_a_killed_consumer_fails_after_the_grace_not_the_session() -> None:
    scene = Scene(group_connection_grace_ms=2_000)
    a, b = scene.stable("a", "b")
    long_sessions(scene)
    scene.close("b")
    scene.advance(1_999)
    assert scene.state is STABLE
    scene.advance(1)
    assert (scene.state, list(scene.group.members)) == (PREPARING, [a])
    assert b not in scene.group.connection_deadlines


@pytest.mark.parametrize("request_name", ["heartbeat", "commit", "join", "sync"])
def test_a_member_that_comes_back_within_the_grace_is_kept(request_name: str) -> None:
    scene = Scene(group_connection_grace_ms=2_000)
    _, b = scene.stable("a", "b")
    long_sessions(scene)
    scene.close("b")
    scene.advance(1_999)
    assert getattr(scene, request_name)("b2", b).error is NONE
    scene.advance(5_000)
    assert b in scene.group.members


def test_refused_request_does_not_restore_a_failed_member() -> None:
    scene = Scene(group_connection_grace_ms=2_000)
    _, b = scene.stable("a", "b")
    scene.close("b")
    scene.heartbeat("b2", b, generation=1)
    scene.advance(2_000)
    assert b not in scene.group.members


def test_static_members_have_no_grace() -> None:
    scene = Scene(group_connection_grace_ms=0)
    (a,) = scene.stable("a", instances={"a": "ia"})
    scene.close("a")
    assert not scene.group.connection_deadlines
    scene.advance(SESSION_MS - 1)
    assert a in scene.group.members
    scene.advance(1)
    assert a not in scene.group.members


def test_without_a_grace_only_the_session_ends_a_member() -> None:
    scene = Scene(group_connection_grace_ms=-1)
    (a,) = scene.stable("a")
    scene.close("a")
    scene.advance(SESSION_MS - 1)
    assert a in scene.group.members


def test_a_grace_of_zero_fails_the_member_at_once() -> None:
    scene = Scene(group_connection_grace_ms=0)
    a, _ = scene.stable("a", "b")
    scene.close("b")
    scene.tick()
    assert list(scene.group.members) == [a]


def test_close_of_an_unknown_connection_changes_nothing() -> None:
    scene = Scene()
    scene.stable("a")
    before = scene.group
    scene.close("stranger")
    assert scene.group is before


def test_a_dropped_join_no_longer_counts_as_joined() -> None:
    scene = Scene(group_connection_grace_ms=-1)
    a, b, c = scene.stable("a", "b", "c")
    long_sessions(scene)
    scene.join("b", b)
    scene.join("b", b)
    scene.join("a", a)
    scene.close("b")
    scene.join("c", c)
    assert scene.state is PREPARING
    assert scene.join("b2", b).error is NONE
    assert scene.generation == 4


def test_a_member_whose_join_was_dropped_is_out_when_the_join_phase_ends() -> None:
    scene = Scene(group_connection_grace_ms=-1)
    a, b = scene.stable("a", "b")
    scene.join("a", a)
    scene.close("a")
    late = scene.join("b", b)
    assert late.parked
    long_sessions(scene)
    scene.advance(REBALANCE_MS)
    assert list(scene.group.members) == [b]
    assert late.join.leader == b


def test_dropped_sync_is_pending_again() -> None:
    scene = Scene(group_connection_grace_ms=-1)
    a, b = scene.completing("a", "b")
    scene.sync("b", b)
    scene.close("b")
    assert b in scene.group.pending_sync
    scene.sync("a", a, {a: b"1", b: b"2"})
    assert scene.sync("b2", b).sync.assignment == b"2"
    assert scene.group.phase_deadline_ms is None


def test_member_held_on_another_connection_survives_a_close() -> None:
    """The member used two connections. Its join is held on the one that remains, so it stays a member."""
    scene = Scene(group_connection_grace_ms=1_000)
    a, b = scene.stable("a", "b")
    held = scene.join("b", b, offer=(*scene.member(b).protocols, ("extra", b"")))
    scene.heartbeat("b2", b)
    assert scene.member(b).connection_id == "b2"
    scene.close("b2")
    assert scene.member(b).connection_id == "b"
    assert not scene.group.connection_deadlines
    scene.advance(2_000)
    scene.join("a", a)
    assert held.error is NONE


def test_a_member_whose_session_ended_while_held_gets_a_new_one_when_its_connection_closes() -> None:
    """Without a new session the member would never be removed."""
    scene = Scene(group_connection_grace_ms=-1)
    a, b = scene.stable("a", "b", instances={"a": "ia", "b": "ib"})
    scene.join("b", b, instance="ib", offer=(*scene.member(b).protocols, ("extra", b"")))
    for _ in range(3):
        scene.advance(SESSION_MS - 1)
        scene.heartbeat("a", a, instance="ia")
    assert b not in scene.group.session_deadlines
    scene.close("b")
    assert scene.group.session_deadlines[scene.member(b).member_id] == scene.now_ms + SESSION_MS


def test_a_pending_id_outlives_its_connection_until_its_timer() -> None:
    scene = Scene()
    pending = scene.join("p", version=4, session_ms=10_000).join.member_id
    scene.close("p")
    scene.advance(9_999)
    assert scene.join("p2", pending, version=4).error is NONE
