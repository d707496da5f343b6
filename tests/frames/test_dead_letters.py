"""Dead letters of share groups on the wire (KIP-1191). Apache Kafka 4.4.0 writes the same records."""

from __future__ import annotations

import asyncpg
import pytest

from protocol.errors import ErrorCode
from protocol.messages.delete_records import DeleteRecordsPartition, DeleteRecordsRequest, DeleteRecordsTopic
from protocol.messages.describe_share_group_offsets import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequestGroup,
)
from protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.update_features import FeatureUpdateKey, UpdateFeaturesRequest
from protocol.records import Record, iter_records
from storage.schema import SEARCH_PATH
from tests.frames.handoff import configure
from tests.frames.members import create_topic, fresh
from tests.frames.share import ACCEPT, REJECT, RELEASE, Reader, reading, scene, send
from tests.frames.transactions import batches_of, fetch
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.postgres import Databases
from tests.steps.waiting import until, until_blocked
from tests.wire import WireClient

NONE = ErrorCode.NONE
TOPIC_RESOURCE, BROKER_RESOURCE = 2, 4
REJECTED, EXCEEDED = b"Offset rejected by client.", b"Offset delivery count exceeded the threshold."


async def set_configs(client: WireClient, kind: int, name: str, configs: dict[str, str]) -> None:
    given = tuple(AlterableConfig(name=key, config_operation=0, value=value) for key, value in configs.items())
    resource = AlterConfigsResource(resource_type=kind, resource_name=name, configs=given)
    answer = await client.send(IncrementalAlterConfigsRequest(resources=(resource,)), 1)
    assert [each.error_code for each in answer.responses] == [NONE]


async def dead_letter_topic(client: WireClient, *, partitions: int = 1, max_bytes: int = 1_048_588) -> str:
    name = fresh("dlq.topic")
    await create_topic(client, name, partitions)
    await set_configs(
        client,
        TOPIC_RESOURCE,
        name,
        {"errors.deadletterqueue.group.enable": "true", "max.message.bytes": str(max_bytes)},
    )
    return name


async def written(client: WireClient, topic: str, count: int, partition: int = 0) -> list[Record]:
    async def records() -> list[Record]:
        answer = await fetch(client, (topic, partition), 0, committed=False)
        return [record for batch in batches_of(answer) for record in iter_records(batch)]

    return await until(records, f"{count} records", holds=lambda found: len(found) >= count)


async def settled_to(reader: Reader, start_offset: int) -> None:
    """Wait until the share group's start offset is `offset`, so that every record before it is settled."""
    request = DescribeShareGroupOffsetsRequest(
        groups=(DescribeShareGroupOffsetsRequestGroup(group_id=reader.group_id, topics=None),)
    )

    async def begins() -> list[int]:
        (group,) = (await reader.client.send(request, 1)).groups
        return [part.start_offset for topic in group.topics for part in topic.partitions]

    await until(begins, f"the group begins at {start_offset}", holds=lambda found: start_offset in found)


def headers_of(reader: Reader, offset: int, count: int, why: bytes) -> tuple[tuple[str, bytes], ...]:
    return (
        ("__dlq.errors.topic", reader.topic.encode()),
        ("__dlq.errors.partition", b"0"),
        ("__dlq.errors.offset", str(offset).encode()),
        ("__dlq.errors.group", reader.group_id.encode()),
        ("__dlq.errors.delivery.count", str(count).encode()),
        ("__dlq.errors.message", why),
    )


async def test_rejected_records_are_written_with_headers_alone(gateway: GatewayProcess) -> None:
    async with scene(gateway, records=3) as one:
        topic = await dead_letter_topic(one.client)
        await configure(one.client, one.group_id, errors_deadletterqueue_topic_name=topic)
        assert await one.fetch() == [(0, 2, 1)]
        assert await one.acknowledge((0, 1, REJECT), (2, 2, ACCEPT)) == NONE
        records = await written(one.client, topic, 2)
        assert [(each.key, each.value) for each in records] == [(None, None)] * 2
        assert [each.headers for each in records] == [headers_of(one, offset, 1, REJECTED) for offset in (0, 1)]
        await settled_to(one, 3)
        assert len(await written(one.client, topic, 2)) == 2


async def test_records_delivered_too_often_are_written_with_key_and_value(gateway: GatewayProcess) -> None:
    async with scene(gateway, share_delivery_count_limit="2") as one:
        topic = await dead_letter_topic(one.client)
        copies = {"errors_deadletterqueue_topic_name": topic, "errors_deadletterqueue_copy_record_enable": "true"}
        await configure(one.client, one.group_id, **copies)
        await send(one.client, one.topic, b"first", b"second")
        assert await one.fetch() == [(0, 1, 1)]
        assert await one.fetch((0, 1, RELEASE)) == [(0, 1, 2)]
        assert await one.fetch((0, 0, RELEASE), (1, 1, REJECT)) == []
        records = sorted(await written(one.client, topic, 2), key=lambda record: record.value or b"")
        assert [each.value for each in records] == [b"first", b"second"]
        assert [each.headers for each in records] == [headers_of(one, 0, 2, EXCEEDED), headers_of(one, 1, 2, REJECTED)]
        await settled_to(one, 2)


async def test_dead_letter_goes_to_its_records_partition_modulo_the_topics(
    gateway: GatewayProcess,
) -> None:
    async with scene(gateway, records=1) as one:
        topic = await dead_letter_topic(one.client, partitions=3)
        await configure(one.client, one.group_id, errors_deadletterqueue_topic_name=topic)
        assert await one.fetch() == [(0, 0, 1)]
        assert await one.acknowledge((0, 0, REJECT)) == NONE
        assert len(await written(one.client, topic, 1, partition=0)) == 1


async def test_dead_letter_too_large_for_its_topic_has_no_value(
    gateway: GatewayProcess,
) -> None:
    async with scene(gateway) as one:
        topic = await dead_letter_topic(one.client, max_bytes=1_200)
        copies = {"errors_deadletterqueue_topic_name": topic, "errors_deadletterqueue_copy_record_enable": "true"}
        await configure(one.client, one.group_id, **copies)
        values = [b"a" * 500, b"b" * 500, b"c" * 2_000, b"d" * 500]
        await send(one.client, one.topic, *values)
        assert await one.fetch() == [(0, 3, 1)]
        assert await one.acknowledge((0, 3, REJECT)) == NONE
        records = await written(one.client, topic, 4)
        assert [each.value for each in records] == [values[0], values[1], None, values[3]]
        assert [dict(each.headers)["__dlq.errors.offset"] for each in records] == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("name", "enabled"),
    [("dlq.missing", None), ("dlq.closed", False), ("open", True)],
    ids=["there is none", "it is not enabled", "its name does not begin so"],
)
async def test_records_whose_dead_letters_cannot_be_written_are_archived_and_logged(
    gateway: GatewayProcess, name: str, enabled: bool | None
) -> None:
    async with scene(gateway, records=2) as one:
        topic = fresh(name)
        if enabled is not None:
            await create_topic(one.client, topic, 1)
            await set_configs(
                one.client, TOPIC_RESOURCE, topic, {"errors.deadletterqueue.group.enable": str(enabled).lower()}
            )
        await configure(one.client, one.group_id, errors_deadletterqueue_topic_name=topic)
        assert await one.fetch() == [(0, 1, 1)]
        assert await one.acknowledge((0, 1, REJECT)) == NONE
        await settled_to(one, 2)
        told = [line for line in gateway.log_text().splitlines() if one.group_id in line and "dead letters" in line]
        assert len(told) == 1
        assert "0-1" in told[0]
        assert topic in told[0]


async def test_dead_letter_topic_is_created_if_the_broker_allows_it(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory({"errors.deadletterqueue.auto.create.topics.enable": "true"})
    async with scene(gateway, records=1) as one:
        topic = fresh("dlq.made")
        await configure(one.client, one.group_id, errors_deadletterqueue_topic_name=topic)
        assert await one.fetch() == [(0, 0, 1)]
        assert await one.acknowledge((0, 0, REJECT)) == NONE
        await settled_to(one, 1)
        request = MetadataRequest(topics=(MetadataRequestTopic(name=topic),), allow_auto_topic_creation=False)
        (made,) = (await one.client.send(request, 12)).topics
        assert made.error_code == NONE
        assert len(await written(one.client, topic, 1)) == 1


async def test_dead_letters_go_to_a_topic_that_another_node_creates_at_the_same_time(
    gateway_factory: GatewayFactory, postgres: Databases
) -> None:
    """Each node that leads a partition of the group creates the topic for its first dead letter."""
    url = postgres.create()
    gateway = gateway_factory({"errors.deadletterqueue.auto.create.topics.enable": "true"}, database_url=url)
    async with scene(gateway, records=1) as one:
        topic = fresh("dlq.made")
        await configure(one.client, one.group_id, errors_deadletterqueue_topic_name=topic)
        assert await one.fetch() == [(0, 0, 1)]
        other = await asyncpg.connect(url, server_settings={"search_path": SEARCH_PATH})
        try:
            async with other.transaction():
                await other.execute("select from cluster for update")
                assert await one.acknowledge((0, 0, REJECT)) == NONE
                await until_blocked(other)
                made = await other.fetch(
                    "select name from create_topics(null, array[$1], array[1], array[$2], array[false], array[null])",
                    topic,
                    '{"errors.deadletterqueue.group.enable": "true"}',
                )
                assert made == [(topic,)]
        finally:
            await other.close()
        await settled_to(one, 1)
        assert len(await written(one.client, topic, 1)) == 1


async def test_lower_share_version_writes_no_dead_letters(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory()
    async with scene(gateway, records=1) as one:
        lower = FeatureUpdateKey(feature="share.version", max_version_level=1, upgrade_type=2)
        answer = await one.client.send(UpdateFeaturesRequest(feature_updates=(lower,)), 1)
        assert answer.error_code == NONE
        topic = await dead_letter_topic(one.client)
        await configure(one.client, one.group_id, errors_deadletterqueue_topic_name=topic)
        assert await one.fetch() == [(0, 0, 1)]
        assert await one.acknowledge((0, 0, REJECT)) == NONE
        await settled_to(one, 1)
        assert await written(one.client, topic, 0) == []


async def test_dead_letters_of_a_killed_gateway_are_written_by_its_successor(
    gateway_factory: GatewayFactory, postgres: Databases
) -> None:
    """A lock on the dead-letter topic keeps its writer waiting until the gateway is dead."""
    url = postgres.create()
    gateway = gateway_factory(database_url=url)
    async with scene(gateway, records=2) as one:
        topic = await dead_letter_topic(one.client)
        await configure(one.client, one.group_id, errors_deadletterqueue_topic_name=topic)
        assert await one.fetch() == [(0, 1, 1)]
        lock = await asyncpg.connect(url)
        try:
            async with lock.transaction():
                await lock.execute(
                    "select from partition join topic using (topic_id) where name = $1 for update of partition", topic
                )
                assert await one.acknowledge((0, 1, REJECT)) == NONE
                gateway.kill()
            assert await lock.fetchval("select ranges::text from share_partition") == "[[2, 3, 1]]"
        finally:
            await lock.close()
        gateway.start()
        async with reading(gateway, one.group_id, one.topic, one.topic_id) as again:
            assert await again.fetch() == []
            records = await written(again.client, topic, 2)
            assert {dict(each.headers)["__dlq.errors.offset"] for each in records} == {b"0", b"1"}
            await settled_to(again, 2)


async def test_dead_letter_of_a_deleted_record_is_written(gateway_factory: GatewayFactory, postgres: Databases) -> None:
    """A lock on the dead-letter topic delays the first dead letter, and the second one waits behind it."""
    url = postgres.create()
    gateway = gateway_factory(database_url=url)
    async with scene(gateway, records=3) as one:
        topic = await dead_letter_topic(one.client)
        await configure(one.client, one.group_id, errors_deadletterqueue_topic_name=topic)
        assert await one.fetch() == [(0, 2, 1)]
        lock = await asyncpg.connect(url)
        try:
            async with lock.transaction():
                await lock.execute(
                    "select from partition join topic using (topic_id) where name = $1 for update of partition", topic
                )
                assert await one.acknowledge((0, 0, REJECT)) == NONE
                await until_blocked(lock)
                assert await one.acknowledge((1, 1, REJECT), (2, 2, ACCEPT)) == NONE
                cut = DeleteRecordsTopic(
                    name=one.topic, partitions=(DeleteRecordsPartition(partition_index=0, offset=3),)
                )
                await one.client.send(DeleteRecordsRequest(topics=(cut,)), 2)
                await send(one.client, one.topic)
                assert await one.fetch(max_wait_ms=5_000) == [(3, 3, 1)]
        finally:
            await lock.close()
        records = await written(one.client, topic, 2)
        assert [dict(each.headers)["__dlq.errors.offset"] for each in records] == [b"0", b"1"]
