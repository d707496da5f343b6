"""SyncGroup: which syncs are held, answered and refused."""

from __future__ import annotations

import pytest

from gateway.coordinator.classic.model import GroupState
from protocol.errors import ErrorCode

from .invariants import must_store
from .scene import REBALANCE_MS, Scene, protocols

NONE = ErrorCode.NONE
REBALANCING = ErrorCode.REBALANCE_IN_PROGRESS
UNKNOWN = ErrorCode.UNKNOWN_MEMBER_ID
COMPLETING = GroupState.COMPLETING_REBALANCE
PREPARING = GroupState.PREPARING_REBALANCE
STABLE = GroupState.STABLE


def test_sync_errors_change_nothing() -> None:
    assert Scene().sync("a", "ghost").error is UNKNOWN
    scene = Scene()
    a, _ = scene.completing("a", "b")
    before = scene.group
    assert scene.sync("a", "ghost").error is UNKNOWN
    assert scene.sync("a", a, generation=1).error is ErrorCode.ILLEGAL_GENERATION
    assert scene.sync("a", a, generation=3).error is ErrorCode.ILLEGAL_GENERATION
    assert scene.group is before


@pytest.mark.parametrize("state", ["completing", "stable"])
@pytest.mark.parametrize(
    ("protocol_type", "protocol_name", "error"),
    [
        ("connect", "range", ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ("consumer", "sticky", ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
        ("consumer", "range", NONE),
        (None, None, NONE),
    ],
)
def test_sync_names_the_right_protocol_or_none(
    state: str, protocol_type: str | None, protocol_name: str | None, error: ErrorCode
) -> None:
    scene = Scene()
    (a,) = getattr(scene, state)("a")
    asked = scene.sync("a", a, {a: b"x"}, protocol_type=protocol_type, protocol_name=protocol_name)
    assert asked.error is error
    answered = ("consumer", "range") if error is NONE else (None, None)
    assert (asked.sync.protocol_type, asked.sync.protocol_name) == answered


def test_a_follower_that_syncs_after_the_leader_is_answered_at_once() -> None:
    scene = Scene()
    a, b = scene.completing("a", "b")
    assert scene.sync("a", a, {a: b"1", b: b"2"}).sync.assignment == b"1"
    assert must_store(scene.last)
    assert scene.sync("b", b).sync.assignment == b"2"
    assert not must_store(scene.last)


def test_a_follower_that_syncs_before_the_leader_is_held() -> None:
    scene = Scene()
    a, b = scene.completing("a", "b")
    held = scene.sync("b", b)
    assert held.parked
    scene.sync("a", a, {a: b"1", b: b"2"})
    assert held.sync.assignment == b"2"


def test_members_without_an_assignment_are_stored_with_zero_bytes() -> None:
    """Ids that the leader invented are ignored. A member that was left out gets zero bytes, as from Kafka."""
    scene = Scene()
    a, b = scene.completing("a", "b")
    held = scene.sync("b", b)
    leader = scene.sync("a", a, {"ghost": b"x"})
    assert [member.assignment for member in scene.group.members.values()] == [b"", b""]
    assert leader.sync.assignment == held.sync.assignment == b""
    assert scene.sync("b", b).sync.assignment == b""


def test_other_protocol_types_are_opaque() -> None:
    """An assignment of zero bytes stays zero bytes."""
    scene = Scene()
    joined = scene.join("a", protocol_type="sr", offer=(("v0", b"{}"),))
    asked = scene.sync("a", joined.join.member_id, protocol_type="sr", protocol_name="v0")
    assert (asked.error, asked.sync.assignment) == (NONE, b"")
    assert scene.state is STABLE


def test_a_leader_that_fails_before_it_assigns_sends_followers_back() -> None:
    scene = Scene()
    a, b = scene.completing("a", "b")
    held = scene.sync("b", b)
    scene.leave("a", a)
    assert held.error is REBALANCING
    assert scene.join("b", b).join.leader == b


def test_an_assignment_that_could_not_be_stored_has_not_been_given() -> None:
    """The write of the assignment fails, so the runner drops the step. The follower is still held, and the leader tries
    again.
    """
    scene = Scene()
    a, b = scene.completing("a", "b")
    held = scene.sync("b", b)
    scene.sync("a", a, {a: b"1", b: b"2"})
    assert must_store(scene.last)
    scene.fail_to_store()
    assert held.parked
    assert scene.join("a", a).error is NONE
    assert scene.sync("a", a, {a: b"3", b: b"4"}).sync.assignment == b"3"
    assert held.sync.assignment == b"4"


@pytest.mark.parametrize("silent", ["a", "b", "ab"])
def test_member_that_never_syncs_is_removed(silent: str) -> None:
    scene = Scene()
    ids = dict(zip("abc", scene.completing("a", "b", "c"), strict=True))
    syncs = {name: scene.sync(name, ids[name]) for name in "abc" if name not in silent}
    for _ in range(REBALANCE_MS // 5_000):
        for name in ids:
            assert scene.heartbeat(name, ids[name]).error is NONE
        scene.advance(5_000)
    assert scene.state is PREPARING
    assert set(scene.group.members) == {ids[name] for name in "abc" if name not in silent}
    if "a" in silent:
        assert {asked.error for asked in syncs.values()} == {REBALANCING}
    else:
        assert {asked.error for asked in syncs.values()} == {NONE}


def test_no_member_is_removed_once_all_have_synced() -> None:
    scene = Scene()
    ids = scene.stable("a", "b")
    assert scene.group.phase_deadline_ms is None
    for _ in range(2 * REBALANCE_MS // 5_000):
        scene.advance(5_000)
        for connection, member_id in zip("ab", ids, strict=True):
            assert scene.heartbeat(connection, member_id).error is NONE
    assert scene.state is STABLE


def test_repeated_syncs_are_answered_alike_and_a_second_list_is_ignored() -> None:
    scene = Scene()
    a, b = scene.stable("a", "b")
    assert scene.sync("b", b).sync == scene.sync("b", b).sync
    assert scene.sync("a", a, {a: b"other", b: b"other"}).sync.assignment == b"for a"
    assert scene.sync("b", b).sync.assignment == b"for b"


def test_a_retried_sync_answers_the_one_it_replaces() -> None:
    scene = Scene()
    a, b = scene.completing("a", "b")
    first, second = scene.sync("b", b), scene.sync("b2", b)
    assert (first.error, second.parked) == (REBALANCING, True)
    scene.sync("a", a, {b: b"2"})
    assert second.sync.assignment == b"2"


def test_the_sync_of_a_member_that_leaves_is_answered() -> None:
    """Upstream never answers such a request."""
    scene = Scene()
    _, b = scene.completing("a", "b")
    held = scene.sync("b", b)
    scene.leave("admin", b)
    assert held.error is UNKNOWN


def test_an_immediate_sync_does_not_prolong_the_session_but_an_answered_one_does() -> None:
    scene = Scene()
    a, b = scene.completing("a", "b")
    scene.advance(1_000)
    held = scene.sync("b", b)
    scene.advance(1_000)
    scene.sync("a", a, {})
    armed = dict(scene.group.session_deadlines)
    assert armed[scene.member(b).member_id] == scene.now_ms + 10_000
    assert held.error is NONE
    scene.advance(1_000)
    scene.sync("b", b)
    assert scene.group.session_deadlines == armed


def test_no_assignment_outlives_its_generation() -> None:
    scene = Scene()
    a, b = scene.stable("a", "b")
    scene.join("a", a)
    scene.join("b", b, offer=protocols("range", topics=("u",)))
    assert [member.assignment for member in scene.group.members.values()] == [b"", b""]
    assert scene.sync("b", b).parked
