"""A group read back from storage."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from gateway.coordinator.classic.machine import next_deadline, restore, stored, stored_member
from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.facts import EveryoneHeard, MemberId
from gateway.coordinator.machine import Document, StoredGroup
from protocol.errors import ErrorCode

from .invariants import broken_invariants, must_store
from .scene import SESSION_MS, Scene, protocols

NONE = ErrorCode.NONE


def restart(scene: Scene, *, after_ms: int = 7, silent_ms: int | None = None, **settings: Any) -> Scene:
    again = Scene(**settings)
    again.now_ms = scene.now_ms + after_ms
    again.last_id = scene.last_id
    group = scene.group
    # Rows are read in any order.
    members = {key: member_row(group, key) for key in reversed(list(group.members))}
    again.group = restore("g", through_json(stored(group)), members, silent_ms, again.now_ms, again.settings)
    assert not broken_invariants(again.group)
    return again


def member_row(group: Group, member_id: MemberId) -> Document:
    row = stored_member(group, member_id)
    assert row is not None
    return json.loads(json.dumps(row.document))


def through_json(group: StoredGroup) -> StoredGroup:
    return dataclasses.replace(group, document=json.loads(json.dumps(group.document)))


def test_restored_stable_group_needs_no_rebalance() -> None:
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
    scene = Scene()
    scene.stable("a", "b")
    again = restart(scene)
    assert set(again.group.session_deadlines.values()) == {again.now_ms + SESSION_MS}
    assert not again.group.connection_deadlines
    again.advance(SESSION_MS - 1)
    assert len(again.group.members) == 2
    again.advance(1)
    assert again.state is GroupState.EMPTY


def test_earlier_connections_identify_no_member_after_a_restore() -> None:
    scene = Scene()
    a, _ = scene.stable("a", "b")
    again = restart(scene)
    asked = again.join("a", version=4)
    assert asked.error is ErrorCode.MEMBER_ID_REQUIRED
    assert asked.join.member_id != a


def test_restored_generation_still_waits_for_its_assignment() -> None:
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
    scene = Scene()
    a, b, c = scene.stable("a", "b", "c")
    again = restart(scene, group_max_size=2)
    assert again.state is GroupState.PREPARING_REBALANCE
    joins = [again.join("a2", a), again.join("b2", b), again.join("c2", c)]
    assert [asked.error for asked in joins] == [NONE, NONE, ErrorCode.GROUP_MAX_SIZE_REACHED]


def test_a_group_stored_in_a_join_phase_may_have_become_too_large() -> None:
    """A write that also stores the next request of its group may store a join phase."""
    scene = Scene()
    a, b, c = scene.stable("a", "b", "c")
    scene.join("a", a, offer=protocols("range", topics=("t", "u")))
    assert scene.state is GroupState.PREPARING_REBALANCE
    again = restart(scene, group_max_size=2)
    assert again.state is GroupState.PREPARING_REBALANCE
    joins = [again.join("a2", a), again.join("b2", b), again.join("c2", c)]
    assert [asked.error for asked in joins] == [NONE, NONE, ErrorCode.GROUP_MAX_SIZE_REACHED]


def test_long_sessions_continue_after_a_restore() -> None:
    scene = Scene()
    ids = [scene.join(connection, session_ms=60_000) for connection in ("a",)]
    a = ids[0].join.member_id
    scene.sync("a", a, {a: b"1"})
    again = restart(scene, silent_ms=45_000)
    assert again.group.session_deadlines[MemberId(a)] == again.now_ms + 15_000
    again = restart(scene, silent_ms=59_999)
    assert again.group.session_deadlines[MemberId(a)] == again.now_ms + 10_000


def test_restored_group_stores_when_all_members_were_heard() -> None:
    scene = Scene()
    a, b = scene.stable("a", "b")
    again = restart(scene)
    again.heartbeat("a2", a)
    assert not again.last.facts
    again.heartbeat("b2", b)
    assert again.last.facts == (EveryoneHeard(),)
    assert must_store(again.last)
    assert stored(again.group).all_heard
    again.heartbeat("b2", b)
    assert not again.last.facts
