"""Answers of a source that the mirror must refuse."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

import pytest
from confluent_kafka.admin import AdminClient

from gateway.commands.client import Cluster
from gateway.commands.errors import CommandError, PassingError
from gateway.mirror.source import Source
from protocol.errors import ErrorCode
from protocol.messages.fetch import FetchableTopicResponse, FetchResponse, PartitionData
from protocol.messages.metadata import MetadataResponse, MetadataResponsePartition, MetadataResponseTopic
from tests.clients.topics import create_topic
from tests.mirror.mirrors import cluster, fill

ID = UUID(int=7)


class Answering:
    """A cluster whose broker 0 leads one partition of each topic. `answered` is the topic of its Fetch answers."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.errors: dict[str, ErrorCode] = {}
        self.answered: tuple[str, int] = ("orders", 0)

    def metadata(self) -> MetadataResponse:
        partition = MetadataResponsePartition(partition_index=0, leader_id=0)
        return MetadataResponse(
            topics=tuple(
                MetadataResponseTopic(
                    name=name, topic_id=ID, partitions=(partition,), error_code=self.errors.get(name, ErrorCode.NONE)
                )
                for name in self.names
            )
        )

    def ask(self, response_type: object, request: object, **_: Any) -> FetchResponse:
        name, partition = self.answered
        answer = PartitionData(partition_index=partition)
        return FetchResponse(responses=(FetchableTopicResponse(topic=name, topic_id=ID, partitions=(answer,)),))


def test_a_topic_of_an_internal_name_is_not_copied_whatever_the_source_says() -> None:
    source = Source(cast(Cluster, Answering("orders", "__consumer_offsets", "__transaction_state")))
    assert [topic.name for topic in source.topics(["*"])] == ["orders"]


def test_a_topic_that_the_source_cannot_describe_now_is_not_left_out() -> None:
    cluster = Answering("orders", "payments")
    cluster.errors["payments"] = ErrorCode.LEADER_NOT_AVAILABLE
    source = Source(cast(Cluster, cluster))
    assert [topic.name for topic in source.topics(["orders"])] == ["orders"]
    with pytest.raises(PassingError, match="topic payments"):
        source.topics(["*"])


def test_a_topic_made_anew_after_its_deletion_was_seen_is_not_read(source: str) -> None:
    topic = create_topic(source, 1)
    with cluster(source) as broker:
        read = Source(broker)
        read.topics([topic])
        admin = AdminClient({"bootstrap.servers": source})
        admin.delete_topics([topic])[topic].result(30)
        assert broker.until_shown(lambda: read.topics([topic]), lambda found: not found) == []
        create_topic(source, 1, topic)
        fill(source, topic, 0, 10)
        assert read.read({(topic, 0): 5}, max_wait_ms=0) == []


@pytest.mark.parametrize("answered", [("orders", 1), ("payments", 0)])
def test_an_answer_for_a_partition_that_was_not_requested_is_refused(answered: tuple[str, int]) -> None:
    cluster = Answering("orders")
    source = Source(cast(Cluster, cluster))
    source.topics(["*"])
    assert [key for key, _ in source.read({("orders", 0): 5}, max_wait_ms=0)] == [("orders", 0)]
    cluster.answered = answered
    with pytest.raises(CommandError, match="which was not requested"):
        source.read({("orders", 0): 5}, max_wait_ms=0)
