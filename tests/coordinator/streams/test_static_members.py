"""Static members of a streams group (upstream 4.4): they leave for a while and return, and their instance ids
distinguish them.
"""

from __future__ import annotations

from typing import Any

import pytest

from gateway.coordinator.facts import MemberId
from gateway.coordinator.streams.tasks import Task, Tasks
from protocol.errors import ErrorCode

from .scene import Scene, refused

ALL = frozenset[Task](("0", index) for index in range(4))
AWAY, GONE = -2, -1
STATIC: dict[str, Any] = {"instance_id": "i", "process_id": "one process"}


def tasks_of(scene: Scene, member_id: str) -> Tasks:
    return scene.group.members[MemberId(member_id)].assigned


def test_returning_static_member_has_its_tasks_at_the_same_epoch() -> None:
    scene = Scene()
    scene.join("a", **STATIC)
    before = scene.group.group_epoch
    left = scene.beat("a", AWAY, instance_id="i")
    assert (left.error, left.member_epoch) == (ErrorCode.NONE, AWAY)
    assert tasks_of(scene, "a") == Tasks(ALL)
    back = scene.join("b", **STATIC)
    assert (back.error, back.member_id, back.member_epoch, back.tasks) == (ErrorCode.NONE, "b", before, Tasks(ALL))
    assert scene.group.group_epoch == before
    assert set(scene.group.members) == {"b"}
    assert set(scene.group.target) == {"b"}


def test_tasks_of_an_absent_static_member_are_kept() -> None:
    scene = Scene()
    scene.join("a", **STATIC)
    scene.beat("a", AWAY, instance_id="i")
    other = scene.join("c")
    assert other.tasks == Tasks()
    scene.restore()
    assert scene.beat("c", other.member_epoch).tasks in (None, Tasks())
    assert tasks_of(scene, "a") == Tasks(ALL)


def test_a_static_member_that_stays_away_for_its_session_is_gone() -> None:
    scene = Scene(session_timeout_ms=45_000)
    scene.join("a", **STATIC)
    scene.pass_time(40_000)
    scene.beat("a", AWAY, instance_id="i")
    scene.pass_time(4_999)
    assert "a" in scene.group.members
    scene.pass_time(1)
    assert not scene.group.members


def test_returning_static_member_with_changes_causes_a_reassignment() -> None:
    scene = Scene()
    scene.join("a", **STATIC)
    before = scene.group.group_epoch
    scene.beat("a", AWAY, instance_id="i")
    scene.join("b", instance_id="i", process_id="another process")
    assert scene.group.group_epoch == before + 1


def test_an_instance_that_is_in_use_is_refused_to_another() -> None:
    scene = Scene()
    scene.join("a", **STATIC)
    assert refused(scene.join("b", **STATIC)) is ErrorCode.UNRELEASED_INSTANCE_ID
    assert set(scene.group.members) == {"a"}


@pytest.mark.parametrize("epoch", [2, AWAY, GONE])
def test_replaced_static_streams_member_is_fenced(epoch: int) -> None:
    scene = Scene()
    scene.join("a", **STATIC)
    scene.beat("a", AWAY, instance_id="i")
    scene.join("b", **STATIC)
    assert refused(scene.beat("a", epoch, instance_id="i")) is ErrorCode.FENCED_INSTANCE_ID


@pytest.mark.parametrize("epoch", [2, AWAY, GONE])
def test_an_instance_that_is_not_in_the_group_is_unknown(epoch: int) -> None:
    scene = Scene()
    scene.join("a")
    assert refused(scene.beat("a", epoch, instance_id="i")) is ErrorCode.UNKNOWN_MEMBER_ID


def test_a_static_member_may_leave_for_good() -> None:
    scene = Scene()
    scene.join("a", **STATIC)
    assert scene.beat("a", GONE, instance_id="i").member_epoch == GONE
    assert not scene.group.members


def test_absent_static_member_has_released_its_revoked_tasks() -> None:
    scene = Scene()
    scene.join("a", **STATIC)
    newcomer = scene.join("b")
    scene.beat("a", 2, instance_id="i")
    assert scene.group.members[MemberId("a")].pending_revocation
    scene.beat("a", AWAY, instance_id="i")
    assert not scene.group.members[MemberId("a")].pending_revocation
    given = scene.beat("b", newcomer.member_epoch).tasks
    assert given is not None
    assert len(given.active) == 2


def test_static_member_that_returns_under_the_id_of_another_gets_the_tasks_of_both() -> None:
    scene = Scene()
    scene.join("a", **STATIC)
    epoch = scene.join("b").member_epoch
    scene.beat("a", scene.beat("a", 2).member_epoch, owned=Tasks(frozenset({("0", 0), ("0", 1)})), instance_id="i")
    scene.beat("b", epoch)
    assert len(tasks_of(scene, "b").active) == 2
    scene.beat("a", AWAY, instance_id="i")
    scene.join("b", **STATIC)
    assert set(scene.group.members) == {"b"}
    assert tasks_of(scene, "b") == Tasks(ALL)
