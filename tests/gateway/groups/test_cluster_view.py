"""What machines are given of the cluster, and when they are told that it changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest_asyncio

from gateway.coordinator.cluster import Cluster
from gateway.groups.cluster_view import ClusterView
from storage.types import NewTopic
from tests.gateway.group_node import GroupNode, group_node


@pytest_asyncio.fixture
async def node(database_url: str) -> AsyncGenerator[GroupNode, None]:
    async with group_node(database_url) as started:
        yield started


async def test_a_load_is_one_snapshot_and_what_changes_nothing_is_none(node: GroupNode) -> None:
    catalog, seen = node.services.catalog, list[Cluster]()
    ClusterView(catalog, seen.append)
    assert seen == []
    first, second = await node.create_topic("a", 2), await node.create_topic("b", 1)
    await catalog.refresh_if_changed()
    await asyncio.sleep(0)
    (both,) = seen
    assert {topic.name: topic.partition_count for topic in both.topics.values()} == {"a": 2, "b": 1}
    assert both.by_id[first.topic_id] is both.topics["a"]

    await node.topics.set_configs(first.topic_id, {"retention.ms": "5"})
    await catalog.refresh_if_changed()
    await asyncio.sleep(0)
    assert len(seen) == 1

    catalog.remove(second.topic_id)
    await asyncio.sleep(0)
    assert list(seen[-1].topics) == ["a"]
    assert seen[-1].topics["a"] is both.topics["a"]
    assert both.topics.keys() == {"a", "b"}, "a snapshot stays as it was"
    assert isinstance(NewTopic, type)
