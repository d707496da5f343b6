"""What machines are given of the cluster, and when they are told that it changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest_asyncio

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.model import Settings
from gateway.groups.cluster_feed import ClusterFeed
from tests.gateway.group_node import GroupNode, group_node


@pytest_asyncio.fixture
async def node(database_url: str) -> AsyncGenerator[GroupNode, None]:
    async with group_node(database_url) as started:
        yield started


class Reader:
    def __init__(self) -> None:
        self.settings = Settings()
        self.seen: list[Cluster] = []

    def cluster_changed(self, cluster: Cluster) -> None:
        self.seen.append(cluster)


async def test_a_load_is_one_snapshot_and_what_changes_nothing_is_none(node: GroupNode) -> None:
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
