"""A pattern matches only topics that its member may describe. The test uses real ACLs on the machine alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gateway.coordinator.cluster import Describing as AnyDescribing
from gateway.coordinator.consumer.machine import CONSUMER
from gateway.coordinator.consumer.model import ConsumerGroup
from gateway.coordinator.consumer.restore import restore, stored_member
from gateway.coordinator.consumer.views import subscribed_topics
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ClusterChanged
from gateway.security.acls import Acls
from gateway.security.authorizer import Describing
from gateway.security.kinds import AclOperation, PatternType, Permission, ResourceType
from storage.types import Acl
from tests.coordinator.consumer.scene import Scene

ALICE, BOB, ROOT = "User:alice", "User:bob", "User:root"
LOGS: dict[str, Any] = {"subscribed_topic_names": (), "subscribed_topic_regex": "logs-.*"}


async def allowing(*granted: tuple[str, str], host: str = "*") -> AnyDescribing:
    """Return an authorizer that lets each principal describe its topics."""
    acls = [
        Acl(ResourceType.TOPIC, PatternType.LITERAL, name, who, host, AclOperation.READ, Permission.ALLOW)
        for who, name in granted
    ]
    return Describing(await Acls.read(acls), frozenset({ROOT}), allow_everyone=False)


def obey(scene: Scene, describing: AnyDescribing | None) -> None:
    scene.cluster = replace(scene.cluster, describing=describing, revision=scene.cluster.revision + 1)


def logs(*more: str) -> dict[str, int]:
    return dict.fromkeys(("logs-a", "logs-b", *more), 1)


async def test_pattern_matches_topics_that_its_member_may_describe():
    scene = Scene(logs("t"))
    obey(scene, await allowing((ALICE, "logs-a")))
    assert scene.told(scene.join("a", principal=ALICE, **LOGS)) == (1, {"logs-a": {0}})
    assert subscribed_topics(scene.group) == {"logs-a"}
    assert scene.told(scene.join("b", principal=BOB, **LOGS)) == (2, {})
    assert scene.told(scene.join("r", principal=ROOT, **LOGS)) == (3, {"logs-b": {0}})
    assert subscribed_topics(scene.group) == {"logs-a", "logs-b"}


async def test_named_topics_are_not_filtered():
    """The heartbeat's handler has already checked a client that names a topic."""
    scene = Scene(logs())
    obey(scene, await allowing())
    named = LOGS | {"subscribed_topic_names": ("logs-b",)}
    assert scene.told(scene.join("a", principal=ALICE, **named)) == (1, {"logs-b": {0}})


async def test_acl_of_a_host_applies_to_members_on_that_host():
    scene = Scene(logs())
    obey(scene, await allowing((ALICE, "logs-a"), host="10.0.0.1"))
    assert scene.told(scene.join("a", principal=ALICE, client_host="/10.0.0.2", **LOGS)) == (1, {})
    assert scene.told(scene.join("b", principal=ALICE, client_host="/10.0.0.1", **LOGS)) == (2, {"logs-a": {0}})


async def test_changed_acls_move_partitions():
    scene = Scene(logs())
    obey(scene, await allowing((ALICE, "logs-a")))
    scene.join("a", principal=ALICE, **LOGS)
    obey(scene, await allowing((ALICE, "logs-a"), (ALICE, "logs-b")))
    assert scene.beat("a", 1, principal=ALICE) == (2, {"logs-a": {0}, "logs-b": {0}})
    obey(scene, await allowing((ALICE, "logs-b")))
    scene.play(ClusterChanged())
    assert scene.beat("a", 2, principal=ALICE) == (2, {"logs-b": {0}})
    assert scene.beat("a", 2, {"logs-b": {0}}, principal=ALICE) == (3, None)


async def test_changed_acls_of_one_member_move_its_partitions():
    """The set of topics that at least one member may describe stays the same."""
    scene = Scene(logs())
    everything = [(who, name) for who in (ALICE, BOB) for name in ("logs-a", "logs-b")]
    obey(scene, await allowing(*everything))
    scene.join("a", principal=ALICE, **LOGS)
    scene.join("b", principal=BOB, **LOGS)
    assert scene.group.group_epoch == 2
    obey(scene, await allowing(*everything[2:]))
    scene.play(ClusterChanged())
    assert scene.group.group_epoch == 3
    assert {key: len(share) for key, share in scene.group.target.items()} == {"a": 0, "b": 2}


async def test_acls_that_pass_to_another_member_move_partitions():
    """After the change each topic is visible to as many members as before, but one of them is another member."""
    scene = Scene(logs())
    carol = "User:carol"
    obey(scene, await allowing((ALICE, "logs-a"), (ALICE, "logs-b"), (BOB, "logs-a"), (carol, "logs-a")))
    for member, principal in (("a", ALICE), ("b", BOB), ("c", carol)):
        scene.join(member, principal=principal, **LOGS)
    epoch = scene.group.group_epoch
    obey(scene, await allowing((ALICE, "logs-a"), (BOB, "logs-a"), (carol, "logs-a"), (carol, "logs-b")))
    scene.play(ClusterChanged())
    assert scene.group.group_epoch == epoch + 1
    logs_b = scene.cluster.topics["logs-b"].topic_id
    assert [member for member, share in scene.group.target.items() if logs_b in share] == ["c"]


async def test_topic_that_no_member_may_describe_changes_nothing():
    scene = Scene(logs())
    obey(scene, await allowing((ALICE, "logs-a")))
    scene.join("a", principal=ALICE, **LOGS)
    scene.topics_changed(logs("logs-c"))
    assert scene.beat("a", 1, principal=ALICE) == (1, None)
    assert scene.group.seen is scene.cluster


async def test_members_with_the_same_acls_are_checked_once():
    """A join checks only the topics of the new member, however many hosts exist. No topic is checked twice."""
    scene = Scene(logs())
    obey(scene, await allowing(("User:*", "logs-a"), ("User:*", "logs-b")))
    for member in "ab":
        scene.join(member, principal=f"User:{member}", client_host=f"/{member}", **LOGS)
    assert len(scene.group.shown) == 1
    assert scene.group.spread is not None


async def test_new_authorizer_that_hides_nothing_moves_nothing():
    scene = Scene(logs())
    scene.join("a", **LOGS)
    obey(scene, await allowing((ALICE, "logs-a"), (ALICE, "logs-b")))
    assert scene.beat("a", 1, {"logs-a": {0}, "logs-b": {0}}, principal=ALICE, connection_number=2) == (1, None)
    assert scene.group.members[next(iter(scene.group.members))].principal == ALICE


async def test_member_that_returns_as_another_principal_is_matched_anew():
    scene = Scene(logs())
    obey(scene, await allowing((ALICE, "logs-a"), (BOB, "logs-b")))
    scene.join("a", principal=ALICE, **LOGS)
    assert scene.beat("a", 1, principal=BOB, connection_number=2) == (1, {})
    assert scene.beat("a", 1, {}, principal=BOB, connection_number=2) == (2, {"logs-b": {0}})


async def test_member_that_returns_as_another_members_principal_is_matched_anew():
    """The topics that the group's patterns match in total, and the differences between members, stay the same."""
    scene = Scene(logs())
    obey(scene, await allowing((ALICE, "logs-a"), (BOB, "logs-b")))
    for member, principal in (("a", ALICE), ("b", BOB), ("c", ALICE)):
        scene.join(member, principal=principal, **LOGS)
    owner = next(key for key, share in scene.group.target.items() if scene.cluster.topics["logs-a"].topic_id in share)
    assert scene.group.members[owner].principal == ALICE
    for member in ("a", "b", "c"):
        scene.beat(
            member, scene.group.members[MemberId(member)].member_epoch, principal=BOB if member == "b" else ALICE
        )
    epoch = scene.group.members[owner].member_epoch
    assert scene.beat(owner, epoch, principal=BOB, connection_number=2)[1] == {}
    assert scene.group.group_epoch == 4


def restored(scene: Scene, *, by_a_release_without_acls: bool = False) -> ConsumerGroup:
    members: dict[Any, Any] = {}
    for member_id in scene.group.members:
        stored = stored_member(scene.group, member_id)
        assert stored is not None
        document: dict[str, Any] = {**stored.document}
        document["member"] = dict(document["member"])
        if by_a_release_without_acls:
            del document["member"]["principal"]
        members[member_id] = document
    return restore("g", CONSUMER.stored(scene.group), members, None, scene.now_ms, scene.settings)


async def test_principal_of_a_member_survives_a_restart():
    scene = Scene(logs())
    obey(scene, await allowing((ALICE, "logs-a"), (BOB, "logs-b")))
    scene.join("a", principal=ALICE, **LOGS)
    scene.group = restored(scene)
    scene.play(ClusterChanged())
    assert scene.group.group_epoch == 1, "nothing is to move"
    scene.topics_changed(logs("logs-c"))
    assert scene.beat("a", 1, {"logs-a": {0}}, principal=ALICE, connection_number=2) == (1, None)


async def test_matches_stored_without_acls_are_checked_before_use():
    scene = Scene(logs())
    scene.join("a", **LOGS)
    scene.group = restored(scene, by_a_release_without_acls=True)
    obey(scene, await allowing((ALICE, "logs-a")))
    scene.play(ClusterChanged())
    assert scene.group.group_epoch == 1
    assert scene.beat("a", 1, principal=ALICE, connection_number=2) == (1, {"logs-a": {0}})
    assert scene.group.group_epoch == 2
