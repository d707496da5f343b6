"""The catalog on a real Postgres: read-through, single flight, unknown names, following another node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from uuid import UUID, uuid4

import pytest

from gateway.config.broker import BrokerConfig
from gateway.log.catalog import MAX_LOOKUPS, Catalog, Unknown
from gateway.quotas.limits import Quotas
from gateway.security.acls import Acls
from storage.deletion import DeletionStore
from storage.errors import StorageUnavailable
from storage.types import Acl, CatalogChanges, ClientQuota, NewTopic, Refusal, Topic
from tests.gateway.data_plane import DataPlane, data_plane


@pytest.fixture
async def node(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url) as node:
        yield node


@pytest.fixture
async def other(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url, name="node-2") as other:
        yield other


def remember_unknown(node: DataPlane, unknown: Unknown) -> None:
    """Create a node's catalog with these limits on unknown names."""
    node.catalog = Catalog(node.topics, node.tail, BrokerConfig(), unknown=unknown)


class CountingTopics:
    """The real store, which also counts its queries."""

    def __init__(self, node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
        self.finds: list[str | UUID] = []
        self.looks = 0
        self.changes = 0
        find, find_by_id = node.topics.find, node.topics.find_by_id
        revision, changes = node.topics.revision, node.topics.changes

        async def counted_revision() -> int:
            self.looks += 1
            return await revision()

        async def counted_changes(since: int) -> CatalogChanges:
            self.changes += 1
            return await changes(since)

        monkeypatch.setattr(node.topics, "revision", counted_revision)
        monkeypatch.setattr(node.topics, "changes", counted_changes)

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


async def test_topic_created_on_this_node_is_known_at_once(node: DataPlane) -> None:
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


async def test_unknown_names_cause_few_queries(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_unknown(node, Unknown(for_s=3600.0))
    await node.catalog.refresh_if_changed()
    counting = CountingTopics(node, monkeypatch)
    ghost = uuid4()
    for _ in range(20):
        assert await node.catalog.resolve("ghost") is None
        assert await node.catalog.resolve_id(ghost) is None
        assert await node.catalog.resolve("no/name") is None
    assert counting.finds == ["ghost", ghost]
    topic = await node.create_topic("ghost")
    assert await node.catalog.resolve("ghost") == topic, "what is created here is known whatever was remembered"


async def test_known_absent_name_costs_a_read_of_the_revision_alone(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_unknown(node, Unknown(for_s=3600.0))
    assert await node.catalog.resolve("t") is None
    await node.catalog.refresh_if_changed()
    counting = CountingTopics(node, monkeypatch)
    began_s = asyncio.get_running_loop().time()
    for _ in range(200):
        assert await node.catalog.resolve("t") is None
    assert asyncio.get_running_loop().time() - began_s < 200 * 0.02, "nobody waits for a pace"
    assert (counting.finds, counting.looks, counting.changes) == ([], 200, 0)
    assert await asyncio.gather(*(node.catalog.resolve("t") for _ in range(100))) == [None] * 100
    assert counting.looks == 201, "all of them share one"
    topic = await create_elsewhere(node, "t")
    assert await node.catalog.resolve("t") == topic, "at least as new as the question"


async def test_unknown_name_is_looked_up_again_after_a_while(node: DataPlane) -> None:
    remember_unknown(node, Unknown(for_s=0.0))
    assert await node.catalog.resolve("t") is None
    topic = await create_elsewhere(node, "t")
    assert await node.catalog.resolve("t") == topic


async def test_remembered_unknown_names_are_bounded(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_unknown(node, Unknown(for_s=3600.0, count=3))
    await node.catalog.refresh_if_changed()
    counting = CountingTopics(node, monkeypatch)
    for name in ("a", "b", "c", "d", "a"):
        await node.catalog.resolve(name)
    assert counting.finds == ["a", "b", "c", "d", "a"]


@pytest.mark.parametrize("count", [1, MAX_LOOKUPS, MAX_LOOKUPS + 1, 500])
async def test_many_missing_topics_cost_no_query_each(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    there = await create_elsewhere(node, "there")
    counting = CountingTopics(node, monkeypatch)
    await node.catalog.resolve_all(["there", "no/name", *(f"ghost{number}" for number in range(count - 1))])
    assert node.catalog.get("there") == there
    asked_by_name = len(counting.finds)
    await node.catalog.resolve_all_ids([there.topic_id, *(uuid4() for _ in range(count))])
    assert asked_by_name <= MAX_LOOKUPS
    assert len(counting.finds) - asked_by_name <= MAX_LOOKUPS


async def test_lookup_survives_the_cancellation_of_its_first_caller(node: DataPlane) -> None:
    topic = await create_elsewhere(node, "t")
    first = asyncio.create_task(node.catalog.resolve("t"))
    second = asyncio.create_task(node.catalog.resolve("t"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == topic


async def test_lost_storage_is_reported_and_not_cached(node: DataPlane, database_url: str) -> None:
    topic = await create_elsewhere(node, "t")
    await node.database.close(1.0)
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


class Looks:
    """The real store with a counted `changes`. Each result is held back until the test releases it."""

    def __init__(self, node: DataPlane, monkeypatch: pytest.MonkeyPatch, *, held: bool = False) -> None:
        self.since: list[int] = []
        self.topics_read: list[int] = []
        self.read, self.go_on = asyncio.Event(), asyncio.Event()
        if not held:
            self.go_on.set()
        changes = node.topics.changes

        async def noted(since: int) -> CatalogChanges:
            found = await changes(since)
            self.since.append(since)
            self.topics_read.append(len(found.topics) + len(found.deleted))
            self.read.set()
            await self.go_on.wait()
            return found

        monkeypatch.setattr(node.topics, "changes", noted)


async def test_only_changes_are_read(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        await create_elsewhere(node, f"t{number}")
    await node.catalog.refresh_if_changed()
    looks = Looks(node, monkeypatch)
    await node.catalog.refresh_if_changed()
    await create_elsewhere(node, "one-more")
    await node.catalog.refresh_if_changed()
    assert looks.topics_read == [0, 1]
    assert node.catalog.revision == await node.topics.revision()
    assert len(node.catalog.topics()) == 21


async def test_callers_during_a_refresh_share_the_next(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(node, monkeypatch, held=True)
    first = asyncio.create_task(node.catalog.refresh_if_changed())
    await looks.read.wait()
    topic = await create_elsewhere(node, "t")
    others = [asyncio.create_task(node.catalog.refresh_if_changed()) for _ in range(5)]
    await asyncio.sleep(0)
    looks.go_on.set()
    await asyncio.gather(first, *others)
    assert len(looks.since) == 2
    assert node.catalog.topics() == [topic], "who asks for what is newest is not given what was read before"


async def test_failed_refresh_fails_its_callers_and_the_next_call_retries(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(since: int) -> CatalogChanges:
        raise StorageUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(node.topics, "changes", gone)
        outcomes = await asyncio.gather(*(node.catalog.refresh_if_changed() for _ in range(3)), return_exceptions=True)
        assert all(isinstance(outcome, StorageUnavailable) for outcome in outcomes)
    topic = await create_elsewhere(node, "t")
    await node.catalog.refresh_if_changed()
    assert node.catalog.topics() == [topic]


async def test_local_change_during_a_refresh_is_not_undone(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh may have read the catalog before a creation, change or deletion on this node. It must not overwrite the
    newer state.
    """
    deleted, altered = await node.create_topic("deleted"), await create_elsewhere(node, "altered")
    looks = Looks(node, monkeypatch, held=True)
    looking = asyncio.create_task(node.catalog.refresh_if_changed())
    await looks.read.wait()
    created = await node.create_topic("created")
    await node.delete_topic(deleted)
    changed = await node.topics.set_configs(altered.topic_id, {"retention.ms": "7"})
    assert isinstance(changed, Topic)
    node.catalog.apply(changed)
    looks.go_on.set()
    await looking
    assert {topic.name: topic for topic in node.catalog.topics()} == {"created": created, "altered": changed}
    await node.catalog.refresh_if_changed()
    assert {topic.name: topic for topic in node.catalog.topics()} == {"created": created, "altered": changed}


async def test_later_of_two_states_of_a_topic_is_kept(node: DataPlane) -> None:
    old = await node.create_topic("t")
    new = await node.topics.set_configs(old.topic_id, {"retention.ms": "7"})
    assert isinstance(new, Topic)
    node.catalog.apply(new)
    node.catalog.apply(old)
    assert node.catalog.get("t") == new


async def test_deleted_incarnation_does_not_return(node: DataPlane) -> None:
    old = await node.create_topic("t")
    await node.delete_topic(old)
    new = await node.create_topic("t")
    assert new.created_revision > old.created_revision
    node.catalog.apply(old)
    assert node.catalog.get("t") == new
    assert node.catalog.get_by_id(old.topic_id) is None
    await node.delete_topic(new)
    node.catalog.apply(new)
    assert node.catalog.topics() == []


async def test_node_that_missed_a_deletion_forgets_the_topic(node: DataPlane, other: DataPlane) -> None:
    kept, gone = await node.create_topic("kept"), await node.create_topic("gone")
    await node.catalog.refresh_if_changed()
    await other.topics.delete(gone.topic_id)
    assert (await DeletionStore(other.database).advance(gone.topic_id)).gone
    await other.topics.create([NewTopic("new", 1, {})])
    await node.catalog.refresh_if_changed()
    assert {topic.name for topic in node.catalog.topics()} == {"kept", "new"}
    assert node.catalog.get("kept") == kept


async def test_deleted_topic_leaves_nothing_in_the_tail(node: DataPlane) -> None:
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
    await node.membership.withdraw()  # another node uses the name again only if no registered node serves the old topic
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


async def test_effective_configs_are_computed_once(node: DataPlane) -> None:
    topic = await node.create_topic("t", configs={"max.message.bytes": "77"})
    config = node.catalog.config(topic)
    assert config.max_message_bytes == 77
    assert node.catalog.config(topic) is config
    altered = await node.topics.set_configs(topic.topic_id, {"max.message.bytes": "78"})
    assert isinstance(altered, Topic)
    node.catalog.apply(altered)
    assert node.catalog.config(altered).max_message_bytes == 78


async def test_topic_whose_deletion_was_lost_is_known_again_although_the_deletion_is_being_read(
    node: DataPlane, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres fails over while this node reads that the topic was deleted, and the new primary has the topic."""
    topic = await node.create_topic("t")
    await node.topics.delete(topic.topic_id)
    await node.topics.create_acls([Acl(2, 3, "t", "User:a", "*", 3, 3)])
    read = Acls.read

    async def overtaken(found: Sequence[Acl]) -> Acls:
        monkeypatch.setattr(Acls, "read", read)
        await node.database.control.fetch("update topic set deleted_at = null")
        await node.database.control.fetch("update cluster set purged_revision = revision")
        node.catalog.reset()
        return await read(found)

    monkeypatch.setattr(Acls, "read", overtaken)
    with suppress(StorageUnavailable):
        await node.catalog.refresh_if_changed()
    await node.catalog.refresh_if_changed()
    found = node.catalog.get("t")
    assert found is not None
    assert found.topic_id == topic.topic_id


async def test_topics_are_read_again_although_another_history_began_at_the_end_of_a_read(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node must not continue at the revision that it read in the former history, because it holds nothing."""
    topic = await node.create_topic("t")
    await node.topics.set_client_quotas([ClientQuota("alice", None, None, "producer_byte_rate", 1.0)])
    read = Quotas.read

    async def overtaken(found: Sequence[ClientQuota]) -> Quotas:
        monkeypatch.setattr(Quotas, "read", read)
        node.catalog.reset()
        return await read(found)

    monkeypatch.setattr(Quotas, "read", overtaken)
    with suppress(StorageUnavailable):
        await node.catalog.refresh_if_changed()
    await node.catalog.refresh_if_changed()
    found = node.catalog.get("t")
    assert found is not None
    assert found.topic_id == topic.topic_id
