"""The estimated cost of encoding is never too low, and not many times too high."""

from __future__ import annotations

from random import Random

import pytest

from protocol import codec
from protocol.messages.describe_groups import DescribedGroup, DescribedGroupMember, DescribeGroupsResponse
from protocol.messages.fetch import FetchableTopicResponse, FetchResponse, PartitionData
from protocol.messages.find_coordinator import Coordinator, FindCoordinatorResponse
from protocol.messages.heartbeat import HeartbeatResponse
from protocol.messages.list_groups import ListedGroup, ListGroupsResponse
from protocol.messages.metadata import MetadataResponse, MetadataResponseTopic
from protocol.schema import Direction, MessageSchema
from protocol.sizes import encoded_bytes, outweighs
from protocol.specialise import EncodedElements
from tests.protocol.values import IDS, MESSAGE_VERSIONS, message_value


@pytest.mark.parametrize(("schema", "version"), MESSAGE_VERSIONS, ids=IDS)
def test_no_answer_is_longer_than_estimated(schema: MessageSchema, version: int):
    if schema.direction is Direction.REQUEST:
        return
    for seed in range(10):
        message = message_value(schema, version, Random(seed), longest=5)
        chunks = codec.encode(message, version)
        records = sum(len(chunk) for chunk in chunks[1::2])
        assert len(b"".join(chunks)) - records - small_records(message) <= encoded_bytes(message)


def small_records(message: object) -> int:
    """Return the size of the records that are copied together with the fields. The estimate leaves them out."""
    if not isinstance(message, FetchResponse):
        return 2**20 if type(message).__name__ in ("ShareFetchResponse",) else 0
    parts = (part for topic in message.responses for part in topic.partitions)
    return sum(len(part.records or b"") for part in parts)


def test_estimate_of_a_crowded_answer_is_below_twice_its_length():
    groups = tuple(ListedGroup(group_id=f"group-{number:06}", protocol_type="consumer") for number in range(1_000))
    answer = ListGroupsResponse(groups=groups)
    assert encoded_bytes(answer) < 2 * sum(map(len, codec.encode(answer, 5)))


def test_encoded_elements_are_estimated_by_their_length():
    topic = MetadataResponseTopic(name="t" * 200)
    element = codec.encode_element(MetadataResponse, "topics", topic, 12)
    told = encoded_bytes(MetadataResponse(topics=EncodedElements((element,) * 100)))
    assert 100 * len(element) <= told < 101 * len(element)


def test_long_strings_weigh_as_elements_do():
    long = Coordinator(key="k" * 25_600)
    for count, weight in ((1, 101), (3, 303)):
        answer = FindCoordinatorResponse(coordinators=(long,) * count)
        assert outweighs(answer, weight - 1)
        assert not outweighs(answer, weight)


def test_bytes_weigh_less_than_strings():
    member = DescribedGroupMember(member_metadata=bytes(1 << 20))
    answer = DescribeGroupsResponse(groups=(DescribedGroup(members=(member,)),))
    assert outweighs(answer, 257)
    assert not outweighs(answer, 258)


def test_short_strings_and_records_weigh_nothing():
    assert not outweighs(HeartbeatResponse(), 0)
    part = PartitionData(records=bytes(1 << 20))
    assert not outweighs(FetchResponse(responses=(FetchableTopicResponse(topic="t", partitions=(part,)),)), 2)
