"""Defects of consumer groups of another gateway (SeaweedFS #9143 and its follow-ups), by values.

Members are keyed by connection, never by client id. `tests/clients/test_seaweed.py` checks the same with stock clients.
`tests/frames/test_seaweed_groups.py` checks what only frames can show.
"""

from __future__ import annotations

import pytest

from gateway.coordinator.classic.machine import describe
from gateway.coordinator.classic.model import GroupState
from protocol.errors import ErrorCode

from .scene import SESSION_MS, Scene, protocols

NONE = ErrorCode.NONE
UNKNOWN = ErrorCode.UNKNOWN_MEMBER_ID
REBALANCING = ErrorCode.REBALANCE_IN_PROGRESS
ID_REQUIRED = ErrorCode.MEMBER_ID_REQUIRED
PREPARING = GroupState.PREPARING_REBALANCE
STABLE = GroupState.STABLE


def test_two_connections_with_one_client_id_are_two_members() -> None:
    scene = Scene(delay_ms=100)
    joins = [scene.join(connection, client_id="sarama") for connection in "ab"]
    scene.advance(1_000)
    assert len({asked.join.member_id for asked in joins}) == 2
    assert [member.client_id for member in describe(scene.group).members] == ["sarama", "sarama"]


def test_a_second_join_without_an_id_on_one_connection_is_the_same_member() -> None:
    scene = Scene(delay_ms=100)
    first, second = scene.join("a"), scene.join("a")
    assert (first.error, second.parked) == (REBALANCING, True)
    scene.advance(1_000)
    assert second.join.member_id == first.join.member_id
    assert len(scene.group.members) == 1


@pytest.mark.parametrize("version", [3, 4])
def test_a_member_that_forgot_its_id_is_that_member_again(version: int) -> None:
    """Joins are held even in versions in which a new member must return with an id."""
    scene = Scene()
    _, b = scene.stable("a", "b")
    assert scene.join("b", version=version).join.member_id == b
    assert scene.join("b", version=version, offer=protocols("range", topics=("u",))).parked
    assert len(scene.group.members) == 2


def test_an_id_asked_for_again_on_its_connection_is_the_same_id() -> None:
    scene = Scene()
    first = scene.join("a", version=4, session_ms=10_000)
    scene.advance(9_000)
    second = scene.join("a", version=4, session_ms=10_000)
    assert (first.error, second.error) == (ID_REQUIRED, ID_REQUIRED)
    assert first.join.member_id == second.join.member_id
    scene.advance(9_999)
    assert first.join.member_id in scene.group.pending
    scene.advance(1)
    assert not scene.group.pending


def test_an_old_version_joins_under_the_id_its_connection_was_given() -> None:
    scene = Scene()
    given = scene.join("a", version=4).join.member_id
    assert scene.join("a", version=3).join.member_id == given
    assert not scene.group.pending


def test_pending_ids_of_two_connections_differ() -> None:
    scene = Scene()
    given = scene.join("a", version=4).join.member_id
    assert scene.join("b", version=4).join.member_id != given


@pytest.mark.parametrize("request_name", ["heartbeat", "commit", "join", "sync"])
def test_a_member_id_from_another_connection_moves_the_key(request_name: str) -> None:
    scene = Scene()
    _, b = scene.stable("a", "b")
    assert getattr(scene, request_name)("b2", b).error is NONE
    assert scene.join("b2").join.member_id == b
    other = scene.join("b", version=4)
    assert other.error is ID_REQUIRED


def test_a_closed_connections_key_is_not_handed_on() -> None:
    scene = Scene()
    _, b = scene.stable("a", "b")
    scene.close("b")
    asked = scene.join("b", version=4)
    assert asked.error is ID_REQUIRED
    assert asked.join.member_id != b


def test_rejoin_keeps_the_assignment_of_this_generation() -> None:
    scene = Scene()
    a, b, c = scene.completing("a", "b", "c")
    scene.sync("a", a, {a: b"1", b: b"2", c: b"3"})
    joined = scene.join("b", b)
    assert joined.join.generation_id == scene.generation
    assert scene.sync("b", b).sync.assignment == b"2"


def test_rejoin_receives_no_assignment_of_an_older_generation() -> None:
    scene = Scene()
    a, b = scene.stable("a", "b")
    scene.join("a", a)
    scene.join("b", b)
    held = scene.sync("b", b)
    assert held.parked
    scene.sync("a", a, {a: b"all"})
    assert held.sync.assignment != b"for b"


def test_a_follower_that_syncs_first_is_held_and_sent_back_only_by_a_new_rebalance() -> None:
    scene = Scene()
    _, b = scene.completing("a", "b")
    held = scene.sync("b", b)
    assert held.parked
    scene.join("c")
    assert held.error is REBALANCING


def test_the_old_generation_is_in_rebalance_until_it_is_over() -> None:
    scene = Scene()
    a, b = scene.stable("a", "b")
    old = scene.generation
    scene.join("c")
    assert scene.heartbeat("a", a, generation=old).error is REBALANCING
    assert scene.heartbeat("b", b, generation=old).error is REBALANCING
    scene.join("a", a)
    scene.join("b", b)
    assert scene.heartbeat("a", a, generation=old).error is ErrorCode.ILLEGAL_GENERATION
    assert scene.heartbeat("a", a).error is NONE


def test_a_member_that_leaves_is_gone_at_once() -> None:
    scene = Scene()
    a, b = scene.stable("a", "b")
    assert scene.leave("a", a).codes == [NONE]
    assert scene.heartbeat("b", b).error is REBALANCING
    assert scene.join("b", b).join.leader == b


def test_a_rejoin_with_foreign_protocols_has_no_effect() -> None:
    scene = Scene()
    _, b = scene.stable("a", "b")
    before = scene.group
    assert scene.join("b", b, offer=protocols("sticky")).error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert scene.group is before
    assert scene.heartbeat("b", b).error is NONE
    assert scene.sync("b", b).sync.assignment == b"for b"


def test_a_batch_of_leavers_has_codes_of_their_own_and_one_generation() -> None:
    scene = Scene()
    a, b, c = scene.stable("a", "b", "c")
    before = scene.generation
    assert scene.leave("x", "ghost", a, b).codes == [UNKNOWN, NONE, NONE]
    assert scene.join("c", c).join.generation_id == before + 1


def test_the_leader_is_replaced_only_if_it_left() -> None:
    scene = Scene()
    a, b, c = scene.stable("a", "b", "c")
    scene.leave("x", "ghost", b)
    assert scene.group.leader_id == a
    scene.join("c", c)
    assert scene.join("a", a).join.leader == a


def test_each_answer_of_a_batched_leave_echoes_its_request() -> None:
    """Null and empty instance ids stay distinct. The codec decides how a version writes them."""
    scene = Scene()
    scene.stable("a", instances={"a": "ia"})
    asked = scene.leave("x", ("", "ia"), ("ghost", None), ("ghost", ""))
    echoed = [(each.member_id, each.group_instance_id) for each in asked.reply.members]  # type: ignore[union-attr]
    assert echoed == [("", "ia"), ("ghost", None), ("ghost", "")]


def test_late_joiner_restarts_the_join_phase_and_every_member_gets_a_share() -> None:
    scene = Scene()
    a, b = scene.completing("a", "b")
    late = scene.join("c")
    assert scene.sync("a", a, {a: b"1", b: b"2"}).error is REBALANCING
    scene.join("b", b)
    leader = scene.join("a", a)
    c = late.join.member_id
    assert [member.member_id for member in leader.join.members] == [a, b, c]
    assert {scene.generation} == {late.join.generation_id, leader.join.generation_id}
    held = scene.sync("c", c)
    scene.sync("a", a, {a: b"1", b: b"2", c: b"3"})
    assert held.sync.assignment == b"3"


def test_sync_with_another_protocol_name_is_refused() -> None:
    scene = Scene()
    (a,) = scene.completing("a")
    wrong = ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert scene.sync("a", a, protocol_type="consumer", protocol_name="sticky").error is wrong
    assert scene.sync("a", a, protocol_type="connect", protocol_name="range").error is wrong
    assert scene.sync("a", a, protocol_type="consumer", protocol_name="range").error is NONE


def test_a_leader_of_another_type_may_assign_nothing() -> None:
    scene = Scene()
    joined = scene.join("a", protocol_type="sr", offer=(("v0", b"\x00not a subscription"),))
    member_id = joined.join.member_id
    before = scene.generation
    assert scene.sync("a", member_id, {}).sync.assignment == b""
    assert scene.heartbeat("a", member_id).error is NONE
    assert (scene.state, scene.generation) == (STABLE, before)


def test_dead_member_is_removed_after_its_own_session() -> None:
    """A member with a session of 6 s is killed silently. A member that joins 7 s later is alone in the group."""
    scene = Scene(group_connection_grace_ms=-1)
    a = scene.join("a", session_ms=6_000).join.member_id
    scene.sync("a", a, {})
    scene.advance(7_000)
    asked = scene.join("b", session_ms=6_000)
    b = asked.join.member_id
    assert asked.join.leader == b
    assert [member.member_id for member in asked.join.members] == [b]


def test_dead_member_is_removed_while_a_newcomer_waits() -> None:
    scene = Scene(group_connection_grace_ms=-1)
    a = scene.join("a", session_ms=6_000).join.member_id
    scene.sync("a", a, {})
    scene.advance(3_000)
    held = scene.join("b", session_ms=SESSION_MS)
    scene.advance(2_999)
    assert held.parked
    scene.advance(1)
    assert held.join.leader == held.join.member_id
