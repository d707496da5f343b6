"""The machines' view of the cluster, and the notification when it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from gateway.config.broker_parsing import parse_broker_configs
from gateway.coordinator.cluster import Cluster
from gateway.coordinator.settings import Settings
from gateway.groups.cluster_feed import ClusterFeed
from gateway.security.acls import Acls
from gateway.security.authorizer import Authorizer, Describing
from gateway.security.kinds import AclOperation, PatternType, Permission, ResourceType
from storage.types import Acl
from tests.gateway.group_node import GroupNode, group_node


@pytest_asyncio.fixture
async def node(database_url: str) -> AsyncGenerator[GroupNode, None]:
    async with group_node(database_url) as started:
        yield started


class Reader:
    def __init__(self) -> None:
        self.settings = Settings()
        self.seen: list[Cluster] = []

    def settings_changed(self, settings: Settings) -> None:
        self.settings = settings

    def cluster_changed(self, cluster: Cluster) -> None:
        self.seen.append(cluster)


async def test_load_is_one_snapshot_and_no_change_gives_none(node: GroupNode) -> None:
    catalog, reader = node.services.catalog, Reader()
    ClusterFeed(catalog, reader)
    (nothing,) = reader.seen
    assert not nothing.topics
    first, second = await node.create_topic("a", 2), await node.create_topic("b", 1)
    await catalog.refresh_if_changed()
    await asyncio.sleep(0)
    (_, both) = reader.seen
    assert {topic.name: topic.partition_count for topic in both.topics.values()} == {"a": 2, "b": 1}
    assert both.by_id[first.topic_id] is both.topics["a"]

    await node.topics.set_configs(first.topic_id, {"retention.ms": "5"})
    await catalog.refresh_if_changed()
    await asyncio.sleep(0)
    assert reader.seen[-1].topics is both.topics, "what changes no partition is no news"

    catalog.remove(second.topic_id)
    await asyncio.sleep(0)
    assert list(reader.seen[-1].topics) == ["a"]
    assert reader.seen[-1].topics["a"] is both.topics["a"]
    assert both.topics.keys() == {"a", "b"}, "a snapshot stays as it was"


@pytest.mark.parametrize("is_created_here", [False, True])
async def test_snapshot_with_a_new_topic_has_the_revision_of_its_creation(
    node: GroupNode, *, is_created_here: bool
) -> None:
    """A coordinator that does not know the topic yet would otherwise revoke it from the members of a group."""
    catalog, reader = node.services.catalog, Reader()
    ClusterFeed(catalog, reader)
    topic = await node.create_topic("a", 1)
    await node.create_topic("b", 1)
    if is_created_here:
        catalog.apply(topic)
    else:
        assert await catalog.resolve("a") == topic
    await asyncio.sleep(0)
    assert "a" in reader.seen[-1].topics
    assert reader.seen[-1].revision >= topic.changed_revision
    before = reader.seen[-1].revision
    await catalog.refresh_if_changed()
    await asyncio.sleep(0)
    assert set(reader.seen[-1].topics) == {"a", "b"}
    assert reader.seen[-1].revision == catalog.revision >= before
    catalog.reset()
    await asyncio.sleep(0)
    assert (reader.seen[-1].topics, reader.seen[-1].revision) == ({}, 0)


async def test_acls_arrive_with_the_topics(node: GroupNode) -> None:
    catalog, reader = node.services.catalog, Reader()
    authorizer = Authorizer(lambda: catalog.acls, frozenset(), allow_everyone=False)
    await node.create_topic("t", 1)
    await catalog.refresh_if_changed()
    ClusterFeed(catalog, reader, authorizer.describing)
    (before,) = reader.seen
    assert before.describing is not None
    alice = before.describing.like("User:alice", "/10.0.0.1")
    assert alice is not None
    assert not before.describing.allows(alice, "t")

    granted = Acl(ResourceType.TOPIC, PatternType.LITERAL, "t", "User:alice", "*", AclOperation.READ, Permission.ALLOW)
    await node.topics.create_acls([granted])
    await catalog.refresh_if_changed()
    await asyncio.sleep(0)
    after = reader.seen[-1]
    assert after.topics is before.topics, "no topic has changed"
    assert after.describing is not None
    assert after.describing is not before.describing
    alice = after.describing.like("User:alice", "/10.0.0.1")
    assert alice is not None
    assert after.describing.allows(alice, "t")

    await node.create_topic("u", 1)
    await catalog.refresh_if_changed()
    await asyncio.sleep(0)
    assert reader.seen[-1].topics is not after.topics
    assert reader.seen[-1].describing is after.describing, "no ACL has changed"

    revoked = Describing(Acls(), frozenset(), allow_everyone=False)
    by_turns = iter((revoked, after.describing))
    ClusterFeed(catalog, reader, lambda: next(by_turns))
    await node.create_topic("v", 1)
    await catalog.refresh_if_changed()
    await asyncio.sleep(0)
    assert reader.seen[-1].describing is after.describing, "whatever the revision"


class Topics:
    """A catalog that only has topics."""

    def __init__(self) -> None:
        self.by_id: dict[UUID, SimpleNamespace] = {}
        self.taken: dict[UUID, None] = {}
        self.revision = 0
        self.broker, self.group_configs = parse_broker_configs({}), dict[str, dict[str, str]]()
        self.changed: Callable[[], None] = lambda: None

    def listen(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def topics(self) -> list[SimpleNamespace]:
        return list(self.by_id.values())

    def get_by_id(self, topic_id: UUID) -> SimpleNamespace | None:
        return self.by_id.get(topic_id)

    def take_changed_topics(self) -> dict[UUID, None]:
        taken, self.taken = self.taken, {}
        return taken

    def change(self, random: Random) -> None:
        """Create a topic (perhaps with the name of an earlier one), or extend, delete or recreate a topic."""
        self.revision += 1
        name = f"t{random.randrange(6)}"
        former = next((topic for topic in self.by_id.values() if topic.name == name), None)
        if former is not None:
            self.taken[former.topic_id] = None
            del self.by_id[former.topic_id]
        if former is None or random.random() < 0.7:
            grows = former is not None and random.random() < 0.5
            topic_id = former.topic_id if former is not None and grows else UUID(int=random.getrandbits(128))
            count = len(former.partitions) + 1 if former is not None and grows else random.randrange(1, 4)
            self.by_id[topic_id] = SimpleNamespace(
                topic_id=topic_id, name=name, partitions=range(count), changed_revision=self.revision
            )
            self.taken[topic_id] = None
        self.changed()


async def test_incremental_changes_equal_a_full_load() -> None:
    random = Random(7)
    for _ in range(50):
        catalog, reader = Topics(), Reader()
        feeding: Any = catalog
        ClusterFeed(feeding, reader)
        for _ in range(20):
            for _ in range(random.randrange(1, 5)):
                catalog.change(random)
            before = reader.seen[-1]
            names = set(before.topics)
            await asyncio.sleep(0)
            now = reader.seen[-1]
            expected = {topic.name: (topic.topic_id, len(topic.partitions)) for topic in catalog.topics()}
            assert {name: (each.topic_id, each.partition_count) for name, each in now.topics.items()} == expected
            assert now.by_id == {each.topic_id: each for each in now.topics.values()}
            assert now.revision == catalog.revision
            assert set(before.topics) == names, "a snapshot stays as it was"
