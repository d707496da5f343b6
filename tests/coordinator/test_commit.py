"""Conditions under which offsets may be committed."""

from __future__ import annotations

import pytest

from gateway.coordinator.classic.model import Group, GroupState
from protocol.errors import ErrorCode

from .invariants import must_store
from .scene import Scene

NONE = ErrorCode.NONE


@pytest.mark.parametrize(("version", "error"), [(8, ErrorCode.ILLEGAL_GENERATION), (9, ErrorCode.GROUP_ID_NOT_FOUND)])
def test_a_members_commit_to_a_missing_group(version: int, error: ErrorCode) -> None:
    scene = Scene()
    before = scene.group
    assert scene.commit("a", "m", generation=1, version=version).error is error
    assert scene.group is before


def test_a_members_commit_is_checked() -> None:
    scene = Scene()
    a, _ = scene.stable("a", "b", instances={"a": "ia"})
    before = scene.group
    assert scene.commit("x", "ghost").error is ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.commit("a", a, generation=0).error is ErrorCode.ILLEGAL_GENERATION
    assert scene.commit("a", a, instance="ix").error is ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.commit("x", "other", instance="ia").error is ErrorCode.FENCED_INSTANCE_ID
    assert scene.group is before
    dead = Scene(Group("g", GroupState.DEAD))
    assert dead.commit("a", "m").error is ErrorCode.COORDINATOR_NOT_AVAILABLE


def test_commit_between_join_and_sync_is_refused() -> None:
    scene = Scene()
    a, _ = scene.completing("a", "b")
    before = scene.group
    assert scene.commit("a", a).error is ErrorCode.REBALANCE_IN_PROGRESS
    assert scene.commit("a").error is ErrorCode.UNKNOWN_MEMBER_ID
    assert scene.group is before


def test_a_commit_without_identity_needs_a_group_without_members() -> None:
    scene = Scene()
    assert scene.commit("x", generation=-1).error is NONE
    assert scene.group.exists
    assert scene.commit("x", generation=-1, instance="ix").error is NONE
    assert not must_store(scene.last)
    (a,) = scene.stable("a")
    assert scene.commit("x", generation=-1).error is ErrorCode.UNKNOWN_MEMBER_ID
    scene.leave("a", a)
    assert scene.commit("x", generation=-1).error is NONE


def test_a_commit_keeps_the_session() -> None:
    """A member may also commit while it revokes, in PreparingRebalance."""
    scene = Scene()
    a, b = scene.stable("a", "b")
    scene.join("a", a)
    for _ in range(4):
        scene.advance(9_000)
        assert scene.commit("b", b).error is NONE
    assert b in scene.group.members
    assert not must_store(scene.last)


def test_a_commit_in_a_transaction_does_not_keep_the_session() -> None:
    scene = Scene()
    a, b = scene.stable("a", "b")
    scene.advance(6_000)
    scene.heartbeat("a", a)
    assert scene.txn_commit("b", b).error is NONE
    scene.advance(6_000)
    assert set(scene.group.members) == {a}
    assert scene.txn_commit("b", b).error is ErrorCode.UNKNOWN_MEMBER_ID


def test_the_first_commit_in_a_transaction_makes_the_group() -> None:
    scene = Scene()
    assert scene.txn_commit("x", "m", generation=0).error is ErrorCode.ILLEGAL_GENERATION
    assert not scene.group.exists
    assert scene.txn_commit("x", generation=-1).error is NONE
    assert scene.group.exists
    assert not must_store(scene.last)
