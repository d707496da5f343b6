"""The catalog on a real Postgres: read-through, single flight, unknown names, following another node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import pytest

import gateway.log.catalog as catalog_module
from storage.errors import StorageUnavailable
from storage.types import NewTopic, Refusal, Topic
from tests.gateway.data_plane import DataPlane, data_plane


@pytest.fixture
async def node(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url) as node:
        yield node


@pytest.fixture
async def other(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url, name="node-2") as other:
        yield other


class CountingTopics:
    """The real store, counting what it is asked."""

    def __init__(self, node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
        self.finds: list[str | UUID] = []
        find, find_by_id = node.topics.find, node.topics.find_by_id

        async def counted_find(name: str) -> Topic | None:
            self.finds.append(name)
            return await find(name)

        async def counted_find_by_id(topic_id: UUID) -> Topic | None:
            self.finds.append(topic_id)
            return await find_by_id(topic_id)

        monkeypatch.setattr(node.topics, "find", counted_find)
        monkeypatch.setattr(node.topics, "find_by_id", counted_find_by_id)


async def create_elsewhere(node: DataPlane, name: str, partitions: int = 1) -> Topic:
    (topic,) = await node.topics.create([NewTopic(name, partitions, {})])
    assert isinstance(topic, Topic)
    return topic


async def test_what_this_node_created_is_known_at_once(node: DataPlane) -> None:
    topic = await node.create_topic("t", 3)
    assert node.catalog.get("t") == topic == node.catalog.get_by_id(topic.topic_id)
    assert node.catalog.topics() == [topic]


async def test_a_missing_topic_is_read_through_once_for_all(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await create_elsewhere(node, "t")
    counting = CountingTopics(node, monkeypatch)
    assert node.catalog.get("t") is None
    found = await asyncio.gather(*(node.catalog.resolve("t") for _ in range(50)))
    assert found == [topic] * 50
    assert counting.finds == ["t"]
    await node.catalog.resolve("t")
    await node.catalog.resolve_id(topic.topic_id)
    assert counting.finds == ["t"], "known now"


async def test_a_missing_id_is_read_through(node: DataPlane) -> None:
    topic = await create_elsewhere(node, "t")
    assert await node.catalog.resolve_id(topic.topic_id) == topic
    assert node.catalog.get("t") == topic


async def test_unknown_names_do_not_hammer_postgres(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "UNKNOWN_FOR_S", 3600.0)
    counting = CountingTopics(node, monkeypatch)
    ghost = uuid4()
    for _ in range(20):
        assert await node.catalog.resolve("ghost") is None
        assert await node.catalog.resolve_id(ghost) is None
        assert await node.catalog.resolve("no/name") is None
    assert counting.finds == ["ghost", ghost]
    topic = await node.create_topic("ghost")
    assert await node.catalog.resolve("ghost") == topic, "what is created here is known whatever was remembered"


async def test_an_unknown_name_is_asked_for_again_after_a_while(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "UNKNOWN_FOR_S", 0.0)
    assert await node.catalog.resolve("t") is None
    topic = await create_elsewhere(node, "t")
    assert await node.catalog.resolve("t") == topic


async def test_remembered_unknown_names_are_bounded(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "MAX_UNKNOWN", 3)
    monkeypatch.setattr(catalog_module, "UNKNOWN_FOR_S", 3600.0)
    counting = CountingTopics(node, monkeypatch)
    for name in ("a", "b", "c", "d", "a"):
        await node.catalog.resolve(name)
    assert counting.finds == ["a", "b", "c", "d", "a"]


@pytest.mark.parametrize("count", [1, catalog_module.MAX_LOOKUPS, catalog_module.MAX_LOOKUPS + 1, 500])
async def test_many_missing_topics_cost_no_query_each(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    there = await create_elsewhere(node, "there")
    counting = CountingTopics(node, monkeypatch)
    await node.catalog.resolve_all(["there", "no/name", *(f"ghost{number}" for number in range(count - 1))])
    assert node.catalog.get("there") == there
    asked_by_name = len(counting.finds)
    await node.catalog.resolve_all_ids([there.topic_id, *(uuid4() for _ in range(count))])
    assert asked_by_name <= catalog_module.MAX_LOOKUPS
    assert len(counting.finds) - asked_by_name <= catalog_module.MAX_LOOKUPS


async def test_a_lookup_outlives_the_one_who_asked_first(node: DataPlane) -> None:
    topic = await create_elsewhere(node, "t")
    first = asyncio.create_task(node.catalog.resolve("t"))
    second = asyncio.create_task(node.catalog.resolve("t"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == topic


async def test_lost_storage_is_said_and_not_remembered(node: DataPlane, database_url: str) -> None:
    topic = await create_elsewhere(node, "t")
    await node.database.hot.close(1.0)
    with pytest.raises(StorageUnavailable):
        await node.catalog.resolve("t")
    with pytest.raises(StorageUnavailable):
        await node.catalog.refresh_if_changed()
    async with data_plane(database_url) as again:
        assert await again.catalog.resolve("t") == topic


async def test_another_nodes_changes_arrive(node: DataPlane, other: DataPlane) -> None:
    kept = await other.create_topic("kept")
    gone = await other.create_topic("gone")
    await node.catalog.refresh_if_changed()
    assert {topic.name for topic in node.catalog.topics()} == {"kept", "gone"}

    await other.delete_topic(gone)
    wider = await other.topics.create_partitions(kept.topic_id, 4)
    assert not isinstance(wider, Refusal)
    await other.topics.set_configs(kept.topic_id, {"retention.ms": "7"})
    assert node.catalog.config(kept).retention_ms != 7
    await node.catalog.refresh_if_changed()
    (topic,) = node.catalog.topics()
    assert len(topic.partitions) == 4
    assert node.catalog.config(topic).retention_ms == 7
    assert node.catalog.get("gone") is None
    assert node.catalog.get_by_id(gone.topic_id) is None


async def test_nothing_is_loaded_while_the_version_stands(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.catalog.refresh_if_changed()
    loads = 0
    load = node.topics.load

    async def counted() -> tuple[int, list[Topic]]:
        nonlocal loads
        loads += 1
        return await load()

    monkeypatch.setattr(node.topics, "load", counted)
    await node.catalog.refresh_if_changed()
    assert loads == 0
    await create_elsewhere(node, "t")
    await asyncio.gather(*(node.catalog.refresh_if_changed() for _ in range(5)))
    assert loads == 1
    await asyncio.gather(*(node.catalog.refresh() for _ in range(5)))
    assert loads == 2, "callers at once share one"


async def test_a_load_that_began_before_is_followed_by_another(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks for what is newest must not be given a snapshot older than the question."""
    load, version = node.topics.load, node.topics.version
    loaded, asked, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow() -> tuple[int, list[Topic]]:
        snapshot = await load()
        loaded.set()
        await go_on.wait()
        return snapshot

    async def noted() -> int:
        found = await version()
        asked.set()
        return found

    monkeypatch.setattr(node.topics, "load", slow)
    monkeypatch.setattr(node.topics, "version", noted)
    refreshing = asyncio.create_task(node.catalog.refresh())
    await loaded.wait()
    topic = await create_elsewhere(node, "t")
    asking = asyncio.create_task(node.catalog.refresh_if_changed())
    await asked.wait()
    go_on.set()
    await asyncio.gather(refreshing, asking)
    assert node.catalog.topics() == [topic]


async def test_what_happens_here_during_a_load_is_not_undone(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot taken before a creation or deletion on this node must not outlive it."""
    deleted = await node.create_topic("deleted")
    load = node.topics.load
    loaded, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> tuple[int, list[Topic]]:
        snapshot = await load()
        loaded.set()
        await go_on.wait()
        return snapshot

    monkeypatch.setattr(node.topics, "load", slow)
    refreshing = asyncio.create_task(node.catalog.refresh())
    await loaded.wait()
    created = await node.create_topic("created")
    await node.delete_topic(deleted)
    go_on.set()
    await refreshing
    assert node.catalog.topics() == [created]
    await node.catalog.refresh_if_changed()
    assert node.catalog.topics() == [created]


async def test_an_older_state_that_crossed_a_load_does_not_stay(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a lookup found before the snapshot may arrive after it."""
    old = await node.create_topic("t")
    new = await node.topics.set_configs(old.topic_id, {"retention.ms": "7"})
    load = node.topics.load

    async def crossed() -> tuple[int, list[Topic]]:
        snapshot = await load()
        node.catalog.apply(old)
        return snapshot

    with monkeypatch.context() as patch:
        patch.setattr(node.topics, "load", crossed)
        await node.catalog.refresh()
    await node.catalog.refresh_if_changed()
    assert node.catalog.get("t") == new


async def test_a_topic_that_is_gone_leaves_nothing_in_the_tail(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    await node.fill(topic, [300])
    key = topic.partitions[0].partition_key
    assert node.tail.known(key, 0.0) is not None
    await node.topics.delete(topic.topic_id)
    await node.catalog.refresh_if_changed()
    assert node.tail.known(key, 0.0) is None


async def test_a_recreated_topic_takes_the_name(node: DataPlane, other: DataPlane) -> None:
    old = await node.create_topic("t")
    await other.catalog.refresh_if_changed()
    await other.delete_topic(old)
    new = await other.create_topic("t")
    node.catalog.apply(new)
    assert node.catalog.get("t") == new
    assert node.catalog.get_by_id(old.topic_id) is None


async def test_dynamic_broker_settings_are_followed(node: DataPlane, other: DataPlane) -> None:
    topic = await node.create_topic("t")
    default = node.catalog.config(topic).retention_ms
    await other.topics.set_broker_configs({"log.retention.ms": "1234"})
    await node.catalog.refresh_if_changed()
    assert node.catalog.config(topic).retention_ms == 1234
    await other.topics.set_broker_configs({}, ["log.retention.ms"])
    await node.catalog.refresh_if_changed()
    assert node.catalog.config(topic).retention_ms == default


async def test_effective_configs_are_worked_out_once(node: DataPlane) -> None:
    topic = await node.create_topic("t", configs={"max.message.bytes": "77"})
    config = node.catalog.config(topic)
    assert config.max_message_bytes == 77
    assert node.catalog.config(topic) is config
    altered = await node.topics.set_configs(topic.topic_id, {"max.message.bytes": "78"})
    assert isinstance(altered, Topic)
    node.catalog.apply(altered)
    assert node.catalog.config(altered).max_message_bytes == 78
