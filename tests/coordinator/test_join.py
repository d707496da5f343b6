"""JoinGroup: which joins are accepted, held and refused, and how they change the group."""

from __future__ import annotations

import pytest

from gateway.coordinator.classic.join import MAX_OFFERED_BYTES
from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.facts import MemberJoined
from gateway.coordinator.requests import Protocols
from protocol.errors import ErrorCode

from .invariants import must_store
from .scene import RANGE, SESSION_MS, Scene, protocols

NONE = ErrorCode.NONE
UNKNOWN = ErrorCode.UNKNOWN_MEMBER_ID
INCONSISTENT = ErrorCode.INCONSISTENT_GROUP_PROTOCOL
ID_REQUIRED = ErrorCode.MEMBER_ID_REQUIRED
FULL = ErrorCode.GROUP_MAX_SIZE_REACHED


def test_a_named_member_cannot_join_a_missing_group() -> None:
    """A refused join does not create the group either."""
    scene = Scene()
    before = scene.group
    asked = scene.join("c", "ghost")
    assert (asked.error, asked.join.member_id) == (UNKNOWN, "ghost")
    assert scene.group is before
    assert not scene.group.exists


def test_an_unknown_member_leaves_a_live_group_alone() -> None:
    scene = Scene()
    scene.stable("a", "b")
    before = scene.group
    assert scene.join("c", "ghost").error is UNKNOWN
    assert scene.group is before


@pytest.mark.parametrize("member_id", ["", "m"])
def test_a_dead_group_sends_joiners_away(member_id: str) -> None:
    scene = Scene(Group("g", GroupState.DEAD, exists=True))
    assert scene.join("c", member_id).error is ErrorCode.COORDINATOR_NOT_AVAILABLE


NOTHING_OFFERED = [("", RANGE), ("consumer", ()), ("consumer", protocols(""))]


@pytest.mark.parametrize(("protocol_type", "offer"), NOTHING_OFFERED, ids=["no type", "no protocols", "nameless"])
def test_join_without_protocols_to_a_missing_group_is_refused(protocol_type: str, offer: Protocols) -> None:
    """The response repeats the blank id, and nothing is created."""
    scene = Scene()
    before = scene.group
    asked = scene.join("c", protocol_type=protocol_type, offer=offer)
    assert (asked.error, asked.join.member_id) == (INCONSISTENT, "")
    assert scene.group is before


@pytest.mark.parametrize(("protocol_type", "offer"), [*NOTHING_OFFERED, ("connect", RANGE)])
def test_join_without_a_common_protocol_is_refused(protocol_type: str, offer: Protocols) -> None:
    """The join is refused in a group with members, too."""
    scene = Scene()
    scene.stable("a")
    before = scene.group
    asked = scene.join("c", protocol_type=protocol_type, offer=offer)
    assert (asked.error, asked.join.member_id) == (INCONSISTENT, "")
    assert scene.group is before


def test_disjoint_protocols_are_refused_and_the_member_can_still_rejoin() -> None:
    scene = Scene()
    (a,) = scene.stable("a")
    assert scene.join("b", offer=protocols("sticky")).error is INCONSISTENT
    assert scene.join("a", a, offer=protocols("sticky")).error is INCONSISTENT
    assert scene.heartbeat("a", a).error is NONE
    assert scene.join("a", a).error is NONE


def test_the_protocol_type_is_null_on_errors_and_set_on_success() -> None:
    """The machine answers with all fields, and the handler writes the fields of the request's version."""
    scene = Scene()
    (a,) = scene.stable("a")
    assert scene.join("a", a).join.protocol_type == "consumer"
    refused = scene.join("b", "ghost").join
    assert (refused.protocol_type, refused.protocol_name, refused.generation_id) == (None, None, -1)
    assert (refused.leader, refused.members) == ("", ())


def test_max_size_admits_n_of_n_plus_one_two_step_joins() -> None:
    """A refused member loses the id it was given, so it delays no other member."""
    scene = Scene(delay_ms=3000, group_max_size=2)
    ids = [scene.join(c, version=4).join.member_id for c in "abc"]
    joins = [scene.join(c, member_id, version=4) for c, member_id in zip("abc", ids, strict=True)]
    assert joins[2].error is FULL
    assert joins[2].join.member_id == ""
    assert not scene.group.pending
    scene.advance(7_000)
    assert [asked.error for asked in joins] == [NONE, NONE, FULL]


def test_max_size_admits_n_of_n_plus_one_direct_joins() -> None:
    scene = Scene(delay_ms=3000, group_max_size=2)
    joins = [scene.join(c, version=3) for c in "abc"]
    scene.advance(7_000)
    assert [asked.error for asked in joins] == [NONE, NONE, FULL]
    assert scene.join("d", version=4).error is FULL


def test_max_size_counts_a_returning_static_member_once() -> None:
    scene = Scene(group_max_size=2)
    instances = {"a": "ia", "b": "ib"}
    scene.stable("a", "b", instances=instances)
    assert scene.join("c", instance="ic", version=5).error is FULL
    assert scene.join("b2", instance="ib", version=5).error is NONE


def test_all_incumbents_may_rejoin_a_full_group() -> None:
    """Members of the group rejoin, and a newcomer is refused in the meantime."""
    scene = Scene(group_max_size=3)
    a, b, c = scene.stable("a", "b", "c")
    held = [scene.join("a", a), scene.join("b", b)]
    again = scene.join("b", b)
    assert [asked.error for asked in held] == [None, ErrorCode.REBALANCE_IN_PROGRESS]
    assert scene.join("c", c).error is NONE
    assert (held[0].error, again.error) == (NONE, NONE)
    assert scene.join("d").error is FULL


def test_last_members_to_rejoin_are_removed_after_max_size_is_lowered() -> None:
    scene = Scene()
    a, b, c = scene.stable("a", "b", "c")
    scene.settings = Scene(group_max_size=2).settings
    joins = [scene.join("a", a), scene.join("b", b), scene.join("c", c)]
    assert [asked.error for asked in joins] == [NONE, NONE, FULL]
    assert list(scene.group.members) == [a, b]


def test_a_new_member_is_not_held_for_ever() -> None:
    """After five minutes the member's first join is answered with error 25 (UNKNOWN_MEMBER_ID)."""
    scene = Scene()
    scene.stable("a", "b")
    held = scene.join("c", rebalance_ms=1_000_000, session_ms=6_000)
    for _ in range(60):
        for connection, member_id in zip("ab", scene.group.members, strict=False):
            scene.heartbeat(connection, member_id)
        scene.advance(5_000)
        if not held.parked:
            break
    assert held.error is UNKNOWN


def test_a_new_member_has_its_own_session_once_it_is_answered() -> None:
    scene = Scene()
    (a,) = scene.stable("a")
    assert scene.group.session_deadlines[scene.member(a).member_id] == scene.now_ms + SESSION_MS
    scene.advance(SESSION_MS - 1)
    assert a in scene.group.members
    scene.advance(1)
    assert a not in scene.group.members
    assert scene.state is GroupState.EMPTY


def test_a_static_member_joins_at_once() -> None:
    """The coordinator does not answer MEMBER_ID_REQUIRED. It derives the member id from the instance id."""
    scene = Scene()
    asked = scene.join("a", instance="ia", version=9)
    assert asked.error is NONE
    assert asked.join.member_id.startswith("ia-")
    assert asked.join.leader == asked.join.member_id


def test_a_pending_id_with_an_instance_is_rejected() -> None:
    scene = Scene()
    pending = scene.join("a", version=5).join.member_id
    before = scene.group
    assert scene.join("a", pending, version=5, instance="ia").error is ErrorCode.UNKNOWN_SERVER_ERROR
    assert scene.group is before


def test_the_end_of_the_join_phase_must_be_stored_before_it_is_answered() -> None:
    """If a step is not stored, it changes nothing. The stored group has no assignments yet."""
    scene = Scene()
    asked = scene.join("a")
    assert asked.error is NONE
    assert must_store(scene.last)
    assert scene.generation == 1
    assert [member.assignment for member in scene.group.members.values()] == [b""]


@pytest.mark.parametrize("state", ["completing", "stable"])
def test_changed_metadata_rebalances(state: str) -> None:
    scene = Scene()
    _, b = getattr(scene, state)("a", "b")
    assert scene.join("b", b, offer=protocols("range", topics=("t", "u"))).parked
    assert scene.state is GroupState.PREPARING_REBALANCE


def test_a_leader_that_rejoins_unchanged_rebalances_a_stable_group() -> None:
    scene = Scene()
    a, _ = scene.stable("a", "b")
    assert scene.join("a", a).parked
    assert scene.state is GroupState.PREPARING_REBALANCE


def test_a_follower_that_rejoins_unchanged_is_answered_at_once() -> None:
    """The reply names the same generation and lists no members."""
    scene = Scene()
    a, b = scene.stable("a", "b")
    asked = scene.join("b", b)
    assert asked.error is NONE
    assert (asked.join.generation_id, asked.join.leader, asked.join.members) == (scene.generation, a, ())
    assert scene.state is GroupState.STABLE


def test_leader_that_rejoins_receives_the_members_again() -> None:
    """The group is in CompletingRebalance."""
    scene = Scene()
    a, b = scene.completing("a", "b")
    asked = scene.join("a", a)
    assert [member.member_id for member in asked.join.members] == [a, b]
    assert scene.state is GroupState.COMPLETING_REBALANCE


def test_a_member_of_an_emptied_group_is_unknown() -> None:
    scene = Scene()
    (a,) = scene.stable("a")
    scene.leave("a", a)
    assert scene.state is GroupState.EMPTY
    assert scene.join("a", a).error is UNKNOWN


def test_the_generation_and_the_freedom_to_change_type_survive_an_empty_group() -> None:
    scene = Scene()
    (a,) = scene.stable("a")
    scene.leave("a", a)
    assert scene.generation == 2
    asked = scene.join("b", protocol_type="connect", offer=(("default", b"x"),))
    assert (asked.join.generation_id, asked.join.protocol_type) == (3, "connect")


def test_a_pending_id_can_be_used_from_another_connection() -> None:
    scene = Scene()
    pending = scene.join("a", version=4).join.member_id
    asked = scene.join("b", pending, version=4)
    assert (asked.error, asked.join.member_id) == (NONE, pending)
    assert scene.member(pending).connection_id == "b"


def test_newcomer_that_repeats_its_join_on_one_connection_keeps_its_pending_id() -> None:
    scene = Scene()
    first = scene.join("a", version=4).join.member_id
    again = scene.join("a", version=4)
    assert (again.error, again.join.member_id) == (ID_REQUIRED, first)
    assert list(scene.group.pending) == [first]


@pytest.mark.parametrize("session_ms", [5_999, 1_800_001])
@pytest.mark.parametrize("member_id", ["", "m"])
def test_a_session_timeout_out_of_bounds_is_refused(session_ms: int, member_id: str) -> None:
    scene = Scene()
    before = scene.group
    asked = scene.join("a", member_id, session_ms=session_ms)
    assert (asked.error, asked.join.member_id) == (ErrorCode.INVALID_SESSION_TIMEOUT, member_id)
    assert scene.group is before


@pytest.mark.parametrize("rebalance_ms", [-1, 0])
def test_without_a_rebalance_timeout_the_session_timeout_is_taken(rebalance_ms: int) -> None:
    scene = Scene()
    asked = scene.join("a", version=0, rebalance_ms=rebalance_ms)
    assert scene.member(asked.join.member_id).rebalance_timeout_ms == SESSION_MS


def test_a_join_beyond_the_bytes_that_a_group_may_offer_is_refused() -> None:
    """Each generation stores what all members offer."""
    scene = Scene()
    half = (("range", bytes(MAX_OFFERED_BYTES // 2)),)
    a, _ = scene.completing("a", "b", offer=half)
    before = scene.group
    assert scene.join("c").error is ErrorCode.UNKNOWN_SERVER_ERROR
    assert scene.join("a", a, offer=(*half, *protocols("roundrobin"))).error is ErrorCode.UNKNOWN_SERVER_ERROR
    assert scene.group is before
    assert scene.join("a", a, offer=half).error is NONE, "as much as before"


def test_a_retried_join_answers_the_one_it_replaces() -> None:
    """A member whose join is held on one connection sends it again on another. The first join must be answered, too."""
    scene = Scene()
    a, b = scene.stable("a", "b")
    first = scene.join("a", a)
    second = scene.join("a2", a)
    assert (first.error, second.parked) == (ErrorCode.REBALANCE_IN_PROGRESS, True)
    assert scene.join("b", b).error is NONE
    assert second.join.generation_id == scene.generation


def test_facts_say_why_in_the_clients_words_but_not_without_bound() -> None:
    scene = Scene()
    asked = scene.join("a", reason="x" * 10_000)
    assert scene.last.facts[0] == MemberJoined(asked.join.member_id, None, "x" * 255)
    assert str(scene.last.facts[0]).endswith(": " + "x" * 255)
    assert all(len(str(fact)) < 500 for fact in scene.last.facts)
