"""Refusals that are derived from an API's declaration: what they repeat of a request. `test_errors.py` checks their
codes.
"""

from __future__ import annotations

from random import Random
from typing import Any
from uuid import UUID

import pytest

from gateway.apis.data.fetch import refuse_fetch
from gateway.apis.groups.classic_groups import refuse_join_group
from gateway.apis.groups.find_coordinator import refuse_find_coordinator
from gateway.apis.metadata import refuse_metadata
from gateway.net.refusals import DerivedRefusal
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.messages import create_topics as topics
from protocol.messages import delete_topics as deletion
from protocol.messages import (
    fetch,
    find_coordinator,
    find_message,
    join_group,
    list_offsets,
    metadata,
    write_txn_markers,
)
from protocol.schema import Direction
from tests.protocol.values import message_value

CODE = ErrorCode.NOT_COORDINATOR
ID = UUID(int=7)


def test_a_refusal_repeats_the_name_of_each_element_and_nothing_else() -> None:
    request = topics.CreateTopicsRequest(
        topics=(
            topics.CreatableTopic(name="a", num_partitions=3, replication_factor=2),
            topics.CreatableTopic(name="b", configs=(topics.CreatableTopicConfig(name="x", value="1"),)),
        )
    )
    answer = DerivedRefusal(ApiKey.CREATE_TOPICS)(request, 7, CODE, "why")
    assert answer == topics.CreateTopicsResponse(
        topics=tuple(topics.CreatableTopicResult(name=name, error_code=CODE, error_message="why") for name in "ab")
    )


@pytest.mark.parametrize(
    ("version", "request_", "result"),
    [
        (5, {"topic_names": ("a",)}, {"name": "a"}),
        (6, {"topics": (deletion.DeleteTopicState(name="a"),)}, {"name": "a"}),
        (6, {"topics": (deletion.DeleteTopicState(name=None, topic_id=ID),)}, {"name": None, "topic_id": ID}),
    ],
)
def test_a_refusal_answers_the_array_of_the_version(version: int, request_: Any, result: Any) -> None:
    answer = DerivedRefusal(ApiKey.DELETE_TOPICS)(deletion.DeleteTopicsRequest(**request_), version, CODE, None)
    assert answer == deletion.DeleteTopicsResponse(
        responses=(deletion.DeletableTopicResult(error_code=CODE, error_message=None, **result),)
    )


def test_a_refused_partition_has_its_number_and_no_offset() -> None:
    asked = list_offsets.ListOffsetsPartition(partition_index=3, timestamp=5, current_leader_epoch=9)
    request = list_offsets.ListOffsetsRequest(topics=(list_offsets.ListOffsetsTopic(name="t", partitions=(asked,)),))
    answer: Any = DerivedRefusal(ApiKey.LIST_OFFSETS)(request, 7, CODE, None)
    ((topic,),) = (answer.topics,)
    assert topic.name == "t"
    assert topic.partitions == (list_offsets.ListOffsetsPartitionResponse(partition_index=3, error_code=CODE),)


def test_a_refusal_follows_arrays_of_arrays_down_to_plain_numbers() -> None:
    marked = write_txn_markers.WritableTxnMarkerTopic(name="t", partition_indexes=(4, 2))
    marker = write_txn_markers.WritableTxnMarker(producer_id=8, topics=(marked,))
    answer: Any = DerivedRefusal(ApiKey.WRITE_TXN_MARKERS)(
        write_txn_markers.WriteTxnMarkersRequest(markers=(marker,)), 1, CODE, None
    )
    (result,) = answer.markers
    (topic,) = result.topics
    assert (result.producer_id, topic.name) == (8, "t")
    assert [(part.partition_index, part.error_code) for part in topic.partitions] == [(4, CODE), (2, CODE)]


def test_fetch_is_refused_at_the_top_level_and_on_each_partition() -> None:
    topic = fetch.FetchTopic(topic_id=ID, partitions=(fetch.FetchPartition(partition=2, log_start_offset=6),))
    forgotten = (fetch.ForgottenTopic(topic_id=UUID(int=1), partitions=(1,)),)
    request = fetch.FetchRequest(topics=(topic,), forgotten_topics_data=forgotten)
    answer = refuse_fetch(request, 13, CODE, None)
    partition = fetch.PartitionData(partition_index=2, error_code=CODE, high_watermark=-1, records=b"")
    assert answer == fetch.FetchResponse(
        error_code=CODE, responses=(fetch.FetchableTopicResponse(topic_id=ID, partitions=(partition,)),)
    )


def test_a_name_that_the_version_cannot_leave_out_is_empty() -> None:
    request = metadata.MetadataRequest(topics=(metadata.MetadataRequestTopic(name=None, topic_id=ID),))
    for version, name in ((11, ""), (12, None)):
        answer: Any = refuse_metadata(request, version, CODE, None)
        assert [topic.name for topic in answer.topics] == [name]
    assert refuse_metadata(metadata.MetadataRequest(topics=None), 13, CODE, None) == metadata.MetadataResponse(
        error_code=CODE
    )


def test_values_that_differ_from_wire_defaults_stand_at_the_level_of_the_version() -> None:
    request = find_coordinator.FindCoordinatorRequest(key="g", coordinator_keys=("h",))
    old: Any = refuse_find_coordinator(request, 3, CODE, "why")
    new: Any = refuse_find_coordinator(request, 4, CODE, "why")
    assert (old.node_id, old.port, old.error_code, old.error_message, old.coordinators) == (-1, -1, CODE, "why", ())
    assert [(each.key, each.node_id, each.port, each.error_code) for each in new.coordinators] == [("h", -1, -1, CODE)]
    assert new.error_code == 0


@pytest.mark.parametrize(("version", "protocol_name"), [(6, ""), (7, None)])
def test_a_refused_join_names_the_member_and_no_protocol(version: int, protocol_name: str | None) -> None:
    answer: Any = refuse_join_group(join_group.JoinGroupRequest(member_id="m"), version, CODE, None)
    assert (answer.error_code, answer.member_id, answer.protocol_name) == (CODE, "m", protocol_name)


def test_an_api_whose_response_answers_several_arrays_has_no_derived_refusal() -> None:
    refuse = DerivedRefusal(ApiKey.ALTER_USER_SCRAM_CREDENTIALS)
    schema = find_message(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, Direction.REQUEST)
    assert schema is not None
    with pytest.raises(TypeError, match="several arrays"):
        refuse(message_value(schema, 0, Random(1)), 0, CODE, None)
    with pytest.raises(TypeError, match="no place for a code"):
        DerivedRefusal(ApiKey.ADD_PARTITIONS_TO_TXN)(None, 0, CODE, None)
