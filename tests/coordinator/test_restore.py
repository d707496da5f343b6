"""A group read back from storage (scenarios 12, 57)."""

from __future__ import annotations

from gateway.coordinator.classic import StoredGroup, StoredMember, next_deadline, restore
from gateway.coordinator.model import Group, GroupState
from protocol.errors import ErrorCode

from .invariants import broken_invariants
from .scene import SESSION_MS, Scene

NONE = ErrorCode.NONE


def stored(group: Group) -> StoredGroup:
    return StoredGroup(
        group_id=group.group_id,
        state=group.state,
        protocol_type=group.protocol_type,
        protocol_name=group.protocol_name,
        generation_id=group.generation_id,
        leader_id=group.leader_id,
        members=tuple(
            StoredMember(
                member.member_id,
                member.group_instance_id,
                member.client_id,
                member.client_host,
                member.session_timeout_ms,
                member.rebalance_timeout_ms,
                member.protocols,
                member.assignment,
            )
            for member in group.members.values()
        ),
    )


def restart(scene: Scene, **settings: int) -> Scene:
    again = Scene(**settings)
    again.now_ms = scene.now_ms + 7
    again.last_id = scene.last_id
    again.group = restore(stored(scene.group), again.now_ms, again.settings)
    assert not broken_invariants(again.group)
    return again


def test_a_stable_group_goes_on_without_a_rebalance() -> None:
    scene = Scene()
    a, b = scene.stable("a", "b", instances={"a": "ia"})
    again = restart(scene)
    assert again.heartbeat("a2", a, instance="ia").error is NONE
    assert again.sync("b2", b).sync.assignment == b"for b"
    assert again.commit("b2", b).error is NONE
    assert (again.generation, again.state) == (scene.generation, GroupState.STABLE)
    assert again.group.subscribed_topics == {"t"}
    assert again.group.leader_id == a


def test_everyone_has_a_full_session_to_be_heard_again_and_no_grace() -> None:
    """57."""
    scene = Scene()
    scene.stable("a", "b")
    again = restart(scene)
    assert set(again.group.session_deadlines.values()) == {again.now_ms + SESSION_MS}
    assert not again.group.connection_deadlines
    again.advance(SESSION_MS - 1)
    assert len(again.group.members) == 2
    again.advance(1)
    assert again.state is GroupState.EMPTY


def test_connections_of_before_are_nobodys_key() -> None:
    scene = Scene()
    a, _ = scene.stable("a", "b")
    again = restart(scene)
    asked = again.join("a", version=4)
    assert asked.error is ErrorCode.MEMBER_ID_REQUIRED
    assert asked.join.member_id != a


def test_a_generation_that_awaits_its_assignment_still_does() -> None:
    scene = Scene()
    a, b = scene.completing("a", "b")
    again = restart(scene)
    assert again.group.pending_sync == {a, b}
    assert again.group.phase_deadline_ms == again.now_ms + 60_000
    held = again.sync("b2", b)
    assert held.parked
    assert again.join("a2", a).join.leader == a
    again.sync("a2", a, {b: b"2"})
    assert held.sync.assignment == b"2"


def test_an_empty_group_keeps_its_generation() -> None:
    scene = Scene()
    (a,) = scene.stable("a")
    scene.leave("a", a)
    again = restart(scene)
    assert next_deadline(again.group) is None
    assert again.join("b").join.generation_id == 3


def test_a_group_that_became_too_large_rebalances_at_once() -> None:
    """12."""
    scene = Scene()
    a, b, c = scene.stable("a", "b", "c")
    again = restart(scene, group_max_size=2)
    assert again.state is GroupState.PREPARING_REBALANCE
    joins = [again.join("a2", a), again.join("b2", b), again.join("c2", c)]
    assert [asked.error for asked in joins] == [NONE, NONE, ErrorCode.GROUP_MAX_SIZE_REACHED]
