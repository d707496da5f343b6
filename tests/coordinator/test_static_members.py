"""Static members: their replacement, fencing and absence."""

from __future__ import annotations

import pytest

from gateway.coordinator.classic.model import GroupState
from protocol.errors import ErrorCode

from .invariants import must_store
from .scene import REBALANCE_MS, Scene, protocols

NONE = ErrorCode.NONE
UNKNOWN = ErrorCode.UNKNOWN_MEMBER_ID
FENCED = ErrorCode.FENCED_INSTANCE_ID
REBALANCING = ErrorCode.REBALANCE_IN_PROGRESS
PREPARING = GroupState.PREPARING_REBALANCE
COMPLETING = GroupState.COMPLETING_REBALANCE
STABLE = GroupState.STABLE
INSTANCES = {"a": "ia", "b": "ib"}
"""Return a group in which `a` leads and `b` follows."""


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
def ids(scene: Scene) -> list[str]:
    return scene.stable("a", "b", instances=INSTANCES)


def test_a_replaced_members_held_join_is_fenced(scene: Scene, ids: list[str]) -> None:
    held = scene.join("a", ids[0], instance="ia", version=5)
    replacing = scene.join("a2", instance="ia", version=5)
    assert (held.error, held.join.member_id) == (FENCED, ids[0])
    assert replacing.parked
    assert scene.join("b", ids[1], instance="ib", version=5).error is NONE
    assert replacing.join.leader == replacing.join.member_id


def test_a_replaced_members_held_sync_is_fenced(scene: Scene) -> None:
    """All members start over, because no member can sync in place of the replaced one."""
    a, b = scene.completing("a", "b", instances=INSTANCES)
    held = scene.sync("b", b, instance="ib")
    replacing = scene.join("b2", instance="ib", version=5)
    assert (held.error, replacing.parked, scene.state) == (FENCED, True, PREPARING)
    assert scene.sync("a", a, instance="ia").error is REBALANCING


@pytest.mark.parametrize("request_name", ["join", "sync", "heartbeat", "commit"])
def test_request_under_a_replaced_id_is_fenced(scene: Scene, ids: list[str], request_name: str) -> None:
    """A request with the replaced id alone, without an instance id, gets UNKNOWN_MEMBER_ID. The
    group does not change.
    """
    scene.join("b2", instance="ib", version=5)
    before = scene.group
    assert getattr(scene, request_name)("b", ids[1], instance="ib").error is FENCED
    assert getattr(scene, request_name)("b", ids[1]).error is UNKNOWN
    assert scene.group is before


@pytest.mark.parametrize("request_name", ["sync", "heartbeat", "commit"])
def test_request_without_an_id_is_unknown_and_not_fenced(scene: Scene, ids: list[str], request_name: str) -> None:
    """librdkafka drops its member id by itself and still commits. If the commit were fenced, librdkafka would stop for
    good, so the gateway does not fence it. Kafka does.
    """
    before = scene.group
    assert getattr(scene, request_name)("b", "", instance="ib").error is UNKNOWN
    assert scene.group is before


@pytest.mark.parametrize("version", [5, 9])
def test_a_follower_that_returns_takes_its_assignment_over(scene: Scene, ids: list[str], version: int) -> None:
    """No rebalance starts, and the new id is stored before the answer leaves."""
    before = scene.generation
    asked = scene.join("b2", instance="ib", version=version)
    new_id = asked.join.member_id
    assert new_id != ids[1]
    assert must_store(scene.last)
    assert (asked.join.generation_id, asked.join.leader, asked.join.members) == (before, ids[0], ())
    assert not asked.join.skip_assignment
    assert scene.sync("b2", new_id, instance="ib").sync.assignment == b"for b"
    assert (scene.state, list(scene.group.members)) == (STABLE, [ids[0], new_id])


def test_returning_leader_sees_its_former_id_as_leader_before_version_9(scene: Scene, ids: list[str]) -> None:
    """The reply names the member's former id as the leader, so the member does not assign."""
    asked = scene.join("a2", instance="ia", version=8)
    assert (asked.join.leader, asked.join.members, asked.join.skip_assignment) == (ids[0], (), False)
    assert scene.group.leader_id == asked.join.member_id
    assert scene.sync("a2", asked.join.member_id, instance="ia").sync.assignment == b"for a"


def test_a_leader_that_returns_leads_without_assigning_from_version_9(scene: Scene, ids: list[str]) -> None:
    asked = scene.join("a2", instance="ia", version=9)
    new_id = asked.join.member_id
    assert (asked.join.leader, asked.join.skip_assignment) == (new_id, True)
    assert [(member.member_id, member.group_instance_id) for member in asked.join.members] == [
        (new_id, "ia"),
        (ids[1], "ib"),
    ]
    assert scene.sync("a2", new_id, instance="ia").sync.assignment == b"for a"


def test_a_leader_that_rejoins_under_its_own_id_rebalances(scene: Scene, ids: list[str]) -> None:
    assert scene.join("a", ids[0], instance="ia", version=5).parked
    assert scene.state is PREPARING


def test_a_known_follower_that_changes_its_offer_rebalances(scene: Scene, ids: list[str]) -> None:
    assert scene.join("b", ids[1], instance="ib", offer=protocols("range", "sticky")).parked
    assert scene.state is PREPARING


def test_a_known_follower_that_changes_nothing_is_answered_at_once(scene: Scene, ids: list[str]) -> None:
    assert scene.join("b", ids[1], instance="ib").join.member_id == ids[1]
    assert scene.state is STABLE


def test_a_member_that_returns_with_another_choice_rebalances() -> None:
    """The new member's vote changes the selected protocol."""
    scene = Scene()
    scene.stable("a", instances={"a": "ia"}, offer=protocols("range", "roundrobin"))
    asked = scene.join("a2", instance="ia", version=5, offer=protocols("roundrobin", "range"))
    assert asked.join.generation_id == 2
    assert asked.join.protocol_name == "roundrobin"


@pytest.mark.parametrize("version", [5, 9])
@pytest.mark.parametrize("who", ["a", "b"])
def test_a_member_that_returns_with_other_topics_rebalances(
    scene: Scene, ids: list[str], who: str, version: int
) -> None:
    """In this case Kafka returns the former assignment, and no member ever receives the new topics. The gateway
    rebalances.
    """
    before = scene.generation
    asked = scene.join("new", instance=INSTANCES[who], version=version, offer=protocols("range", topics=("u", "t")))
    assert (asked.parked, scene.state) == (True, PREPARING)
    other = ids[1 if who == "a" else 0]
    scene.join("old", other, instance=INSTANCES["b" if who == "a" else "a"])
    assert (asked.error, asked.join.generation_id) == (NONE, before + 1)
    assert scene.group.subscribed_topics == {"t", "u"}


def test_a_member_that_returns_with_the_same_topics_in_other_words_does_not_rebalance(scene: Scene) -> None:
    """Another order of topics, or other metadata, does not count as a change."""
    scene.stable("a", "b", instances=INSTANCES, offer=protocols("range", topics=("t", "u")))
    asked = scene.join("b2", instance="ib", version=5, offer=protocols("range", topics=("u", "t"), user_data=b"new"))
    assert (asked.error, scene.state) == (NONE, STABLE)


def test_static_return_with_opaque_metadata_does_not_rebalance(scene: Scene) -> None:
    """Opaque metadata never counts as a change."""
    scene.stable("a", "b", instances=INSTANCES, offer=(("range", b"?"),))
    asked = scene.join("b2", instance="ib", version=5, offer=(("range", b"!"),))
    assert (asked.error, scene.state) == (NONE, STABLE)


def test_a_replacement_that_could_not_be_stored_has_not_happened(scene: Scene, ids: list[str]) -> None:
    scene.join("b2", instance="ib", version=5)
    assert must_store(scene.last)
    scene.fail_to_store()
    assert scene.heartbeat("b", ids[1], instance="ib").error is NONE


def test_returning_between_join_and_sync_rebalances(scene: Scene) -> None:
    """A static member may return as leader or as follower."""
    scene.completing("a", "b", instances=INSTANCES)
    assert scene.join("b2", instance="ib", version=5).parked
    assert scene.state is PREPARING


def test_id_with_another_members_instance_is_refused(scene: Scene, ids: list[str]) -> None:
    before = scene.group
    assert scene.join("b", ids[1], instance="ia", version=5).error is FENCED
    assert scene.join("x", "ghost", instance="ia", version=5).error is FENCED
    assert scene.join("a", ids[0], instance="ix", version=5).error is UNKNOWN
    assert scene.group is before


def test_an_absent_static_follower_is_kept_until_its_session_ends() -> None:
    scene = Scene()
    a = scene.join("a", session_ms=10_000, rebalance_ms=20_000).join.member_id
    held = scene.join("b", instance="ib", version=5, session_ms=60_000, rebalance_ms=20_000)
    scene.join("a", a, rebalance_ms=20_000)
    b = held.join.member_id
    scene.sync("a", a, {a: b"1", b: b"2"})
    scene.sync("b", b, instance="ib")
    ends_ms = scene.now_ms + 60_000
    for _ in range(2):
        held = scene.join("a", a, rebalance_ms=20_000)
        scene.advance(20_000)
        assert b in [member.member_id for member in held.join.members]
        scene.sync("a", a, {})
        scene.advance(5_000)
        scene.heartbeat("a", a)
        assert scene.group.session_deadlines[scene.member(b).member_id] == ends_ms
    scene.heartbeat("a", a)
    scene.advance(ends_ms - scene.now_ms - 1)
    assert b in scene.group.members
    scene.advance(1)
    assert b not in scene.group.members


def test_leadership_moves_away_from_an_absent_static_leader(scene: Scene, ids: list[str]) -> None:
    for member_id in list(scene.group.members):
        scene.group = scene.group.with_session_deadline(member_id, scene.now_ms + 2 * REBALANCE_MS)
    held = scene.join("b", ids[1], instance="ib", offer=protocols("range", topics=("u",)))
    scene.advance(REBALANCE_MS)
    assert held.join.leader == ids[1]
    assert [member.member_id for member in held.join.members] == ids


def test_instances_do_not_share_a_connections_member() -> None:
    """A static member is identified by its instance id alone. A dynamic member on the same connection is identified by
    the connection.
    """
    scene = Scene(delay_ms=100)
    held = [scene.join("a", instance="ia", version=5), scene.join("a", version=3)]
    scene.advance(1_000)
    assert len({asked.join.member_id for asked in held}) == 2
