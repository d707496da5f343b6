"""For every served API and version, the gateway can refuse each element of a request with an answer
of the right form.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock, Mock
from uuid import UUID

import pytest
from aiokafka import TopicPartition
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.errors import KafkaError as AiokafkaError
from aiokafka.protocol.commit import OffsetFetchResponse_v3

from gateway.apis import SERVED
from gateway.net.dispatch import top_level_refusal
from gateway.net.errors import REFUSAL_CODES, UNAVAILABLE_CODES, storage_code
from protocol import codec
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from protocol.messages.find_coordinator import FindCoordinatorRequest
from protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup, OffsetFetchRequestTopic
from protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from protocol.schema import Field, message_schema, struct_schema
from storage.errors import StorageConflict, StorageUnavailable
from storage.types import Refusal

CODE = ErrorCode.POLICY_VIOLATION
REFUSE = {line.api_key: line.refusal for line in SERVED}
LINES = [(line.api_key, version) for line in SERVED for version in range(line.min_version, line.max_version + 1)]


def refused(api_key: ApiKey, version: int, request: Any, code: ErrorCode, message: str | None = None) -> Any:
    return REFUSE[api_key](request, version, code, message)


def filled(struct_type: type[Any], version: int) -> Any:
    """Return a struct in which every array has two elements with different names."""
    return struct_type(
        **{
            field.name: value_of(field, version)
            for field in struct_schema(struct_type).fields
            if version in field.versions
        }
    )


def value_of(field: Field, version: int) -> Any:
    if isinstance(field.kind, type):
        element: Any = filled(field.kind, version)
    else:
        element = {"string": "name", "uuid": UUID(int=7), "bytes": b"b", "records": b"r"}.get(field.kind.name, 1)
        if field.kind.name == "bool":
            element = True
    return (element, element) if field.is_array else element


def codes(message: Any, version: int) -> Iterator[int]:
    for field in struct_schema(type(message)).fields:
        if version not in field.versions:
            continue
        value = getattr(message, field.name)
        if field.name in ("error_code", "partition_error_code"):
            yield value
        elif isinstance(field.kind, type) and value is not None:
            for element in value if field.is_array else (value,):
                yield from codes(element, version)


@pytest.mark.parametrize(("api_key", "version"), LINES)
def test_everything_asked_for_fails_with_the_code(api_key: ApiKey, version: int) -> None:
    request = filled(codec.request_class(api_key), version)
    response = refused(api_key, version, request, CODE, "because")
    encoded = b"".join(bytes(chunk) for chunk in codec.encode(response, version))
    decoded, end = codec.decode(codec.response_class(api_key), version, encoded)
    assert end == len(encoded)
    found = list(codes(decoded, version))
    assert found, "the version has no place for a code"
    assert set(found) == {CODE}


@pytest.mark.parametrize(("api_key", "version"), LINES)
def test_a_request_for_nothing_can_be_refused_too(api_key: ApiKey, version: int) -> None:
    request = codec.request_class(api_key)()
    codec.encode(refused(api_key, version, request, CODE), version)


@pytest.mark.parametrize(("api_key", "version"), LINES)
def test_refusal_uses_the_top_level_code_if_there_is_one(api_key: ApiKey, version: int) -> None:
    response: Any = top_level_refusal(api_key, version, CODE)
    fields = {field.name: field for field in message_schema(codec.response_class(api_key)).fields}
    has_place = "error_code" in fields and version in fields["error_code"].versions
    assert (response is not None) == has_place
    if response is not None:
        assert response.error_code == CODE
        codec.encode(response, version)


# --- places that clients depend on ------------------------------------------------------------------------------------


def test_produce_fails_each_partition_with_offset_minus_one() -> None:
    request = ProduceRequest(
        topic_data=(
            TopicProduceData(name="a", partition_data=(PartitionProduceData(index=0), PartitionProduceData(index=5))),
            TopicProduceData(name="b", partition_data=(PartitionProduceData(index=1),)),
        )
    )
    response = refused(ApiKey.PRODUCE, 9, request, CODE, "because")
    found = [
        (topic.name, partition.index, partition.error_code, partition.base_offset, partition.error_message)
        for topic in response.responses
        for partition in topic.partition_responses
    ]
    assert found == [("a", 0, CODE, -1, "because"), ("a", 5, CODE, -1, "because"), ("b", 1, CODE, -1, "because")]


def test_fetch_fails_at_the_top_and_on_each_partition() -> None:
    request = FetchRequest(topics=(FetchTopic(topic="a", partitions=(FetchPartition(partition=4),)),))
    response = refused(ApiKey.FETCH, 12, request, CODE)
    assert response.error_code == CODE
    partition = response.responses[0].partitions[0]
    assert (partition.partition_index, partition.error_code, partition.high_watermark) == (4, CODE, -1)


@pytest.mark.parametrize(
    ("version", "top", "partitions", "groups"),
    [(1, False, True, False), (5, True, True, False), (7, True, False, False), (8, False, False, True)],
)
def test_offset_fetch_places_the_code_by_version(version: int, top: bool, partitions: bool, groups: bool) -> None:
    request = OffsetFetchRequest(
        group_id="g",
        topics=(OffsetFetchRequestTopic(name="t", partition_indexes=(0, 1)),),
        groups=(OffsetFetchRequestGroup(group_id="g"), OffsetFetchRequestGroup(group_id="h")),
    )
    response = refused(ApiKey.OFFSET_FETCH, version, request, CODE)
    decoded, _ = codec.decode(type(response), version, b"".join(map(bytes, codec.encode(response, version))))
    assert (decoded.error_code == CODE) == top
    assert [p.error_code for topic in decoded.topics for p in topic.partitions] == ([CODE, CODE] if partitions else [])
    assert [(g.group_id, g.error_code) for g in decoded.groups] == ([("g", CODE), ("h", CODE)] if groups else [])


async def test_aiokafka_does_not_take_a_refused_offset_fetch_for_partitions_without_commits() -> None:
    """Otherwise it reads the partitions again from the beginning."""
    request = OffsetFetchRequest(
        group_id="g", topics=(OffsetFetchRequestTopic(name="t", partition_indexes=(0, 1)),), groups=()
    )
    response = refused(ApiKey.OFFSET_FETCH, 3, request, ErrorCode.NOT_COORDINATOR)
    encoded = b"".join(map(bytes, codec.encode(response, 3)))
    coordinator: Any = object.__new__(GroupCoordinator)
    coordinator.group_id = "g"
    answer = AsyncMock(return_value=OffsetFetchResponse_v3.decode(io.BytesIO(encoded)))
    coordinator._send_req = answer  # noqa: SLF001
    coordinator.coordinator_dead = Mock()
    with pytest.raises(AiokafkaError) as raised:
        await coordinator._do_fetch_commit_offsets([TopicPartition("t", 0), TopicPartition("t", 1)])  # noqa: SLF001
    assert getattr(raised.value, "retriable")  # noqa: B009
    coordinator.coordinator_dead.assert_called_once()


def test_find_coordinator_names_no_node() -> None:
    old = refused(ApiKey.FIND_COORDINATOR, 3, FindCoordinatorRequest(key="g"), CODE)
    assert (old.error_code, old.node_id, old.host, old.port) == (CODE, -1, "", -1)
    new = refused(ApiKey.FIND_COORDINATOR, 4, FindCoordinatorRequest(coordinator_keys=("g", "h")), CODE)
    assert [(c.key, c.error_code, c.node_id, c.port) for c in new.coordinators] == [
        ("g", CODE, -1, -1),
        ("h", CODE, -1, -1),
    ]


def test_metadata_by_name_and_by_id() -> None:
    request = MetadataRequest(
        topics=(MetadataRequestTopic(name=None, topic_id=UUID(int=9)), MetadataRequestTopic(name="t"))
    )
    response = refused(ApiKey.METADATA, 12, request, CODE)
    assert [(topic.name, topic.topic_id.int, topic.error_code) for topic in response.topics] == [
        (None, 9, CODE),
        ("t", 0, CODE),
    ]
    assert response.brokers == (), "so that clients keep the metadata they have"


def test_create_topics_gives_each_topic_the_message() -> None:
    request = CreateTopicsRequest(topics=(CreatableTopic(name="a"), CreatableTopic(name="b")))
    response = refused(ApiKey.CREATE_TOPICS, 7, request, CODE, "because")
    assert [(t.name, t.error_code, t.error_message) for t in response.topics] == [
        ("a", CODE, "because"),
        ("b", CODE, "because"),
    ]


def test_leave_group_lists_no_members() -> None:
    request = LeaveGroupRequest(members=(MemberIdentity(member_id="m"),))
    response = refused(ApiKey.LEAVE_GROUP, 5, request, CODE)
    assert (response.error_code, response.members) == (CODE, ())


# --- tables -----------------------------------------------------------------------------------------------------------


def test_every_refusal_has_a_code() -> None:
    assert set(REFUSAL_CODES) == set(Refusal)


@pytest.mark.parametrize("line", SERVED, ids=lambda line: line.api_key.name)
def test_an_absent_database_is_always_a_retriable_code(line: Any) -> None:
    assert storage_code(line.api_key, StorageUnavailable("gone")).retriable
    assert storage_code(line.api_key, StorageConflict("fenced")) == ErrorCode.NOT_COORDINATOR
    assert set(UNAVAILABLE_CODES) <= {line.api_key for line in SERVED} | set(ApiKey)
