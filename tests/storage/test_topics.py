"""The catalog of topics, on a real Postgres."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from uuid import UUID

import asyncpg
import pytest

from storage import topics as module
from storage.deletion import DeletionStore
from storage.errors import StorageUnavailable
from storage.nodes import NodeStore
from storage.pool import Connection, Database, Row
from storage.roles import Roles
from storage.topics import TopicStore, _topic  # pyright: ignore[reportPrivateUsage]
from storage.types import Acl, Assignment, ClientQuota, NewTopic, Refusal, Topic
from tests.steps.waiting import until, until_blocked
from tests.storage.conftest import MakeTopic

NOBODY = UUID(int=77)


async def test_a_created_topic_is_found_by_name_by_id_and_in_the_catalog(topics: TopicStore) -> None:
    (topic,) = await topics.create([NewTopic("orders", 3, {"retention.ms": "-1", "odd": "nul\0"}, internal=True)])
    assert isinstance(topic, Topic)
    assert (topic.name, topic.internal, topic.configs) == ("orders", True, {"retention.ms": "-1", "odd": "nul\0"})
    assert [(partition.partition_index, partition.leader_epoch) for partition in topic.partitions] == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]
    assert len({partition.partition_key for partition in topic.partitions}) == 3
    assert await topics.find("orders") == topic
    assert await topics.find_by_id(topic.topic_id) == topic
    assert (await topics.changes(0)).topics == (topic,)
    assert await topics.find("Orders") is None
    assert await topics.find_by_id(NOBODY) is None


async def test_each_topic_of_a_call_succeeds_or_fails_by_itself(topics: TopicStore) -> None:
    wanted = [NewTopic("a", 1, {}), NewTopic("b", 0, {}), NewTopic("a", 2, {}), NewTopic("c", 1, {})]
    outcomes = await topics.create(wanted)
    assert [outcome if isinstance(outcome, Refusal) else outcome.name for outcome in outcomes] == [
        "a",
        Refusal.INVALID_PARTITIONS,
        Refusal.TOPIC_EXISTS,
        "c",
    ]
    assert [topic.name for topic in (await topics.changes(0)).topics] == ["a", "c"]


async def test_many_concurrent_creations_of_one_name_make_one_topic(topics: TopicStore) -> None:
    outcomes = await asyncio.gather(*(topics.create([NewTopic("a", 2, {})]) for _ in range(6)))
    created = [outcome for (outcome,) in outcomes if isinstance(outcome, Topic)]
    assert len(created) == 1
    assert [outcome for (outcome,) in outcomes if outcome is Refusal.TOPIC_EXISTS] == [Refusal.TOPIC_EXISTS] * 5
    assert await topics.find("a") == created[0]


async def test_a_deletion_frees_the_name_at_once(topics: TopicStore, make_topic: MakeTopic) -> None:
    first = await make_topic("orders", 2)
    assert await topics.delete(first.topic_id)
    assert not await topics.delete(first.topic_id)
    assert not await topics.delete(NOBODY)
    assert await topics.find("orders") is None
    assert await topics.find_by_id(first.topic_id) is None
    second = await make_topic("orders", 1)
    assert second.topic_id != first.topic_id
    keys = {partition.partition_key for topic in (first, second) for partition in topic.partitions}
    assert len(keys) == 3
    assert (await topics.changes(0)).topics == (second,)


async def behind(
    database: Database, topic: Topic, topics: TopicStore, ttl_ms: int = 60_000
) -> Callable[[], Awaitable[object]]:
    """Delete the topic while another broker is registered that does not know of the deletion. Return a function that
    renews the registration of that broker with the catalog's present revision."""
    nodes = NodeStore(database)
    node_id = await nodes.register("other:9092", {"PLAINTEXT": ("other", 9092)}, None, ttl_ms)
    await nodes.renew(node_id, ttl_ms, catalog_revision=await topics.revision())
    assert await topics.delete(topic.topic_id)

    async def renew() -> object:
        return await nodes.renew(node_id, ttl_ms, catalog_revision=await topics.revision())

    return renew


async def test_a_name_is_free_when_every_other_broker_knows_of_the_deletion(
    database: Database, topics: TopicStore, make_topic: MakeTopic
) -> None:
    topic = await make_topic("orders")
    renew = await behind(database, topic, topics)
    impatient = TopicStore(database, name_patience_s=0.1)
    with pytest.raises(StorageUnavailable, match="topic orders was deleted"):
        await impatient.create([NewTopic("orders", 1, {})])
    refused, another = await impatient.create([NewTopic("orders", 1, {}), NewTopic("another", 1, {})])
    assert refused is Refusal.NAME_IN_USE
    assert await topics.find("orders") is None
    assert await topics.find("another") == another
    waiting = asyncio.ensure_future(make_topic("orders"))
    await asyncio.wait([waiting], timeout=0.1)
    assert not waiting.done()
    await renew()
    assert (await waiting).topic_id != topic.topic_id


async def test_topics_that_were_created_before_postgres_failed_are_returned(
    database: Database, database_url: str, topics: TopicStore, make_topic: MakeTopic
) -> None:
    """A client that repeats the request would get TOPIC_ALREADY_EXISTS for a topic that it has created."""
    await behind(database, await make_topic("orders"), topics)
    watcher, locker = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
    creating = asyncio.ensure_future(topics.create([NewTopic("orders", 1, {}), NewTopic("another", 1, {})]))
    another = await until(lambda: topics.find("another"))
    async with locker.transaction():
        await locker.execute("select from sluice.cluster for update")
        await until_blocked(watcher)
        await watcher.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and wait_event_type = 'Lock'"
        )
        assert await creating == [Refusal.NAME_IN_USE, another]
    await locker.close()
    await watcher.close()


async def test_a_name_is_free_when_the_registration_of_the_other_broker_has_expired(
    database: Database, topics: TopicStore, make_topic: MakeTopic
) -> None:
    topic = await make_topic("orders")
    await behind(database, topic, topics, ttl_ms=1_000)
    started_s = time.monotonic()
    await make_topic("orders")
    assert time.monotonic() - started_s > 0.5


async def test_the_node_itself_and_controllers_keep_no_name_in_use(database: Database) -> None:
    nodes = NodeStore(database)
    topics = TopicStore(database, nodes.registration)
    controller = Roles(is_broker=False, is_controller=True)
    await NodeStore(database).register("other:9092", {"PLAINTEXT": ("other", 9092)}, None, 60_000, roles=controller)
    await nodes.register("self:9092", {"PLAINTEXT": ("self", 9092)}, None, 60_000)
    for _ in range(2):
        (topic,) = await topics.create([NewTopic("orders", 1, {})])
        assert isinstance(topic, Topic)
        assert await topics.delete(topic.topic_id)


async def test_rows_of_a_deleted_topic_stay_until_every_broker_knows_of_the_deletion(
    database: Database, topics: TopicStore, make_topic: MakeTopic
) -> None:
    renew = await behind(database, await make_topic("orders"), topics)
    deletions = DeletionStore(database)
    assert await deletions.due(10) == []
    await renew()
    assert [due.name for due in await deletions.due(10)] == ["orders"]


async def test_added_partitions_follow_the_existing_ones(topics: TopicStore, make_topic: MakeTopic) -> None:
    topic = await make_topic("orders", 2)
    grown = await topics.create_partitions(topic.topic_id, 4)
    assert isinstance(grown, Topic)
    assert grown.partitions[:2] == tuple(replace(each, partition_count=4) for each in topic.partitions)
    assert [partition.partition_index for partition in grown.partitions] == [0, 1, 2, 3]
    for total in (4, 1, 0, -1):
        assert await topics.create_partitions(topic.topic_id, total) is Refusal.INVALID_PARTITIONS
    assert await topics.create_partitions(NOBODY, 9) is Refusal.UNKNOWN_TOPIC
    await topics.delete(topic.topic_id)
    assert await topics.create_partitions(topic.topic_id, 9) is Refusal.UNKNOWN_TOPIC


async def test_topics_with_assignments_are_assembled_in_steps_after_the_transaction(
    topics: TopicStore, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [topic for topic in await topics.create([NewTopic(f"t{n}", 2, {}) for n in range(7)]) if topic]
    wanted = {(topic.topic_id, 1): Assignment((3, 1), 1) for topic in made if isinstance(topic, Topic)}
    turns, inside, built, transact = 0, False, Counter[int](), database.hot.transact

    async def watched(change: Callable[[Connection], Awaitable[list[Row]]]) -> list[Row]:
        nonlocal inside
        inside = True
        rows = await transact(change)
        inside = False
        return rows

    async def counted(row: Row) -> Topic:
        assert not inside, "locks are held meanwhile"
        topic = _topic(row)
        built[turns] += len(topic.partitions)
        return topic

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(database.hot, "transact", watched)
    monkeypatch.setattr(module, "_built", counted)
    monkeypatch.setattr(module, "_PARTITIONS_PER_STEP", 4)
    monkeypatch.setattr(module, "_TOPIC_AS_PARTITIONS", 0)
    counting = asyncio.create_task(count_turns())
    assigned = await topics.assign(wanted)
    counting.cancel()
    assert sorted(built.values()) == [2, 4, 4, 4], "everybody else has a turn between steps"
    assert {(topic.topic_id, 1): topic.partitions[1].assignment for topic in assigned} == wanted


async def test_topic_configs_are_set_removed_or_unchanged(topics: TopicStore, make_topic: MakeTopic) -> None:
    topic = await make_topic()
    await topics.set_configs(topic.topic_id, {"a": "1", "b": "2", "c": "3"})
    changed = await topics.set_configs(topic.topic_id, {"b": "4", "d": ""}, ["a", "d", "absent"])
    assert isinstance(changed, Topic)
    assert changed.configs == {"b": "4", "c": "3", "d": ""}
    assert await topics.find("orders") == changed
    assert await topics.set_configs(NOBODY, {"a": "1"}) is Refusal.UNKNOWN_TOPIC


async def test_broker_configs_are_set_and_removed(topics: TopicStore) -> None:
    assert await topics.load_broker_configs() == {}
    await topics.set_broker_configs({"log.retention.ms": "5", "x": "1"}, [])
    await topics.set_broker_configs({"x": "2"}, ["log.retention.ms", "absent"])
    assert await topics.load_broker_configs() == {"x": "2"}
    await topics.set_broker_configs({"x": "3"}, broker="1")
    assert (await topics.load_broker_configs(), await topics.load_broker_configs("1")) == ({"x": "2"}, {"x": "3"})
    assert (await topics.changes(0)).broker_configs == {"": {"x": "2"}, "1": {"x": "3"}}


async def test_another_history_without_quotas_and_subscriptions_reports_none(
    topics: TopicStore, database: Database
) -> None:
    known = (await topics.changes(0)).revision
    assert (await topics.changes(known)).client_quotas is None
    for identity in ("one", "another"):
        await database.control.fetch("select adopt_history($1, 5)", identity)
    changes = await topics.changes(known)
    assert changes.revision > known
    assert changes.client_quotas == []


async def test_quotas_are_returned_when_they_changed_and_in_another_history(
    topics: TopicStore, database: Database
) -> None:
    async def quotas_since(since: int) -> tuple[int, object]:
        changes = await topics.changes(since)
        return changes.revision, changes.client_quotas

    revision, none = await quotas_since(0)
    assert none == []
    quotas = [ClientQuota("u", None, None, "producer_byte_rate", 5.0), ClientQuota(None, None, "::1", "x", 1.0)]
    await topics.set_client_quotas(quotas)
    assert (await quotas_since(revision))[1] == quotas
    revision = (await quotas_since(0))[0]
    assert (await quotas_since(revision))[1] is None
    await topics.set_client_quotas([quotas[0]._replace(value=None)])
    revision, now = await quotas_since(revision)
    assert now == quotas[1:]
    # Another node may remember the quotas of the previous history.
    await database.control.fetch("select adopt_history('another', 5)")
    await database.control.fetch("select adopt_history('and another', 5)")
    assert (await quotas_since(revision))[1] == quotas[1:]


async def test_acls_are_returned_when_they_changed_and_in_another_history(
    topics: TopicStore, database: Database
) -> None:
    revision = (await topics.changes(0)).revision
    assert (await topics.changes(0)).acls == []
    assert (await topics.changes(revision)).acls is None
    acls = [Acl(2, 3, "t", "User:a", "*", 3, 3), Acl(3, 4, "g\0", "User:*", "::1", 2, 2)]
    await topics.create_acls(acls)
    changes = await topics.changes(revision)
    assert (changes.revision > revision, sorted(changes.acls or ())) == (True, acls)
    assert (await topics.changes(changes.revision)).acls is None
    await topics.create_acls(acls[:1])
    changes = await topics.changes(0)
    assert await topics.delete_acls([acls[0], acls[0]._replace(operation=4)]) == acls[:1]
    assert await topics.delete_acls(acls[:1]) == []
    assert (await topics.changes(changes.revision)).acls == acls[1:]
    revision = (await topics.changes(0)).revision
    for identity in ("one", "another"):
        await database.control.fetch("select adopt_history($1, 5)", identity)
    assert (await topics.changes(revision)).acls == acls[1:]


async def test_every_change_has_the_next_revision_and_is_found_by_it(topics: TopicStore, make_topic: MakeTopic) -> None:
    other = await make_topic("other")
    before = await topics.revision()
    topic = await make_topic()
    assert topic.created_revision == topic.changed_revision == before + 1
    changes = await topics.changes(before)
    assert (changes.revision, changes.whole, changes.topics) == (before + 1, False, (topic,))
    assert changes.broker_configs is None

    for number, change in enumerate(
        [topics.set_configs(topic.topic_id, {"a": "1"}), topics.create_partitions(topic.topic_id, 2)], 2
    ):
        altered = await change
        assert isinstance(altered, Topic)
        assert altered.changed_revision == before + number
        assert altered.created_revision == topic.created_revision
        assert (await topics.changes(before + number - 1)).topics == (altered,)

    await topics.set_broker_configs({"a": "b"})
    changes = await topics.changes(before + 3)
    assert (changes.topics, changes.broker_configs) == ((), {"": {"a": "b"}})
    await topics.delete(topic.topic_id)
    changes = await topics.changes(before)
    assert (changes.topics, changes.deleted, changes.revision) == ((), (topic.topic_id,), before + 5)
    assert (await topics.changes(0)).topics == (other,)
    assert (await topics.changes(before + 5)).topics == ()


async def test_a_refused_change_is_no_change_of_a_topic(topics: TopicStore, make_topic: MakeTopic) -> None:
    topic = await make_topic()
    before = await topics.revision()
    await topics.create([NewTopic(topic.name, 1, {})])
    await topics.create_partitions(topic.topic_id, 1)
    assert (await topics.changes(before)).topics == ()


async def test_an_empty_catalog_has_a_revision(topics: TopicStore) -> None:
    changes = await topics.changes(0)
    assert (changes.topics, changes.deleted, changes.whole) == ((), (), True)
    assert changes.revision == await topics.revision()


async def test_the_cluster_id_is_a_uuid_in_upstreams_notation(topics: TopicStore) -> None:
    cluster_id = await topics.cluster_id()
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{21}", cluster_id)
    assert len(base64.urlsafe_b64decode(cluster_id + "==")) == 16
    assert await topics.cluster_id() == cluster_id
