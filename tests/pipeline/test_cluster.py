"""Jobs on a cluster that does not answer yet, or not to this user."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # pyright: ignore[reportPrivateImportUsage]

from pipeline.archive import job as archive_job
from pipeline.archive.start import starting_offsets
from pipeline.erase.topic import TopicOfKey
from pipeline.errors import PipelineError
from pipeline.kafka import LATEST, Cluster, UnreachableError
from pipeline.progress import Progress, Stop
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.pipeline import jobs, topics
from tests.secured import AUTHORIZER, USERS, start_secured

NO_LEADERS = -156
"""RD_KAFKA_RESP_ERR__NOENT of librdkafka."""


@pytest.mark.parametrize(
    "code",
    [
        NO_LEADERS, KafkaError.LEADER_NOT_AVAILABLE, KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.OFFSET_NOT_AVAILABLE, KafkaError.REPLICA_NOT_AVAILABLE, KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH, KafkaError.NETWORK_EXCEPTION,
    ],
)  # fmt: skip
def test_partitions_without_a_leader_are_asked_again_later(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """librdkafka reports "No leaders found" if Kafka has created a topic but none of its partitions
    has a leader yet.
    """

    def nobody_leads(_self: AdminClient, asked: Mapping[TopicPartition, Any], **_: object) -> dict[Any, Future[Any]]:
        told: dict[Any, Future[Any]] = {partition: Future() for partition in asked}
        for future in told.values():
            future.set_exception(KafkaException(KafkaError(code)))
        return told

    monkeypatch.setattr(AdminClient, "list_offsets", nobody_leads)
    with pytest.raises(PipelineError, match="cannot answer at the moment"):
        Cluster("127.0.0.1:1").offsets([("orders", 0)], OffsetSpec.latest())


def test_partition_that_its_leader_does_not_know_yet_is_not_taken_for_a_deleted_one(
    gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker of Apache Kafka answers like this until it has heard that it leads the partition."""
    topic, whole, lacking = topics.fresh(gateway.bootstrap, 2), AdminClient.list_offsets, {1}
    [log, _] = Cluster(gateway.bootstrap).logs([topic])

    def unknown(own: AdminClient, asked: Mapping[TopicPartition, Any], **given: Any) -> dict[Any, Future[Any]]:
        answers: dict[Any, Future[Any]] = whole(own, dict(asked), **given)
        for at in answers:
            if at.partition in lacking:
                answers[at] = Future()
                answers[at].set_exception(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
        return answers

    monkeypatch.setattr(AdminClient, "list_offsets", unknown)
    with pytest.raises(UnreachableError, match=f"The leader of {topic}-1 does not know the partition"):
        Cluster(gateway.bootstrap).logs([topic])
    lacking.add(0)
    with pytest.raises(UnreachableError, match=f"The leader of {topic}-0 does not know the partition"):
        # An archive would begin at the partition's end.
        starting_offsets(Cluster(gateway.bootstrap), [log], "0")
    with pytest.raises(UnreachableError, match=f"The leader of {topic}-0 does not know the partition"):
        # An erasure would leave the topic as it is, and call the key erased.
        TopicOfKey(cast(Any, None), Cluster(gateway.bootstrap), topic, log.topic_id, "").is_gone()


@pytest.fixture
def silent() -> Iterator[str]:
    """A port on which the system accepts connections, and no broker reads them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_broker_that_accepts_connections_and_never_answers_may_be_asked_again_later(silent: str) -> None:
    """All requests wait for their deadline of half a minute, so they wait together."""
    requests: list[Callable[[Cluster], object]] = [
        Cluster.existing,
        Cluster.group_states,
        lambda cluster: cluster.logs(["orders"]),
        lambda cluster: cluster.own_settings(["orders"]),
        lambda cluster: cluster.offsets([("orders", 0)], LATEST),
    ]
    with ThreadPoolExecutor(len(requests)) as threads:
        answers = [threads.submit(request, Cluster(silent)) for request in requests]
    for answer in answers:
        with pytest.raises(UnreachableError, match=f"No Kafka broker answers at {silent}"):
            answer.result()


def test_topic_that_the_user_may_not_describe_is_not_taken_for_an_absent_one(gateway_factory: GatewayFactory) -> None:
    """A listing of all topics leaves it out."""
    secured = start_secured(gateway_factory, {**AUTHORIZER, "super.users": "User:ANONYMOUS"})
    topic = topics.fresh(secured.open, 1)
    [log] = Cluster(secured.open).logs([topic])
    user = {"sasl.username": "alice", "sasl.password": USERS["alice"]}
    alice = Cluster(secured.sasl, {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", **user})
    assert topic not in alice.existing()
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        TopicOfKey(cast(Any, None), alice, topic, log.topic_id, "").is_gone()
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        alice.topics([topic])
    for loss in ("fail", "continue"):
        given = ["--bootstrap", secured.sasl, "--out", "x", "--topics", topic, "--on-data-loss", loss]
        arguments = jobs.parse(archive_job, given)
        job = archive_job.Archive(cast(Any, None), alice, arguments, [topic], Progress("archive"), Stop())
        with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
            job.step_once()
    assert not TopicOfKey(cast(Any, None), Cluster(secured.open), topic, log.topic_id, "").is_gone()
    topics.delete(secured.open, topic)
    assert TopicOfKey(cast(Any, None), Cluster(secured.open), topic, log.topic_id, "").is_gone()
