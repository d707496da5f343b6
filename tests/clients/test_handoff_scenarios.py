"""Iggy's handoff scenarios with stock consumers: members join, leave or fall silent while others wait."""

# pyright: reportAttributeAccessIssue=false
# kafka-python's type stubs declare only a part of its admin client.

from __future__ import annotations

import uuid

import confluent_kafka
import kafka
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions  # pyright: ignore[reportPrivateImportUsage]

from tests.clients.topics import create_topic
from tests.clients.workers import KINDS, PARTITIONS, QUICK, RECORDS, Stage, counted, produce
from tests.closing import close
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.steps.waiting import wait_for

EVICTED = (confluent_kafka.KafkaError.UNKNOWN_MEMBER_ID, confluent_kafka.KafkaError.ILLEGAL_GENERATION)


@pytest.mark.parametrize("kind", ["eager", "consumer"])
def test_a_source_that_commits_nothing_delays_the_handoff_until_the_configured_timeout(
    gateway_factory: GatewayFactory, kind: str
) -> None:
    """Scenario 15 of Apache Iggy."""
    stage = Stage(gateway_factory(QUICK), kind, group_handoff_timeout_ms="3000")
    try:
        stage.read_everything()
        stage.start("second")
        stage.board.wait_settled({"first", "second"}, PARTITIONS)
        wait_for(lambda: counted(stage.gateway, "group_handoffs_forced_total")[""] >= 2, "nothing was forced")
        wait_for(lambda: "timeout" in stage.ends(), "it is not counted")
    finally:
        stage.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_leaves_delays_no_handoff(gateway_factory: GatewayFactory, kind: str) -> None:
    """Scenario 21 of Apache Iggy."""
    stage = Stage(gateway_factory(QUICK), kind)
    try:
        first = stage.read_everything()
        stage.start("second")
        stage.wait_pending(2.0)
        first.thread.stop()
        stage.board.wait_settled({"second"}, PARTITIONS)
        assert counted(stage.gateway, "group_handoffs_forced_total") == {"": 0.0}
    finally:
        stage.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_the_successor_of_a_target_that_leaves_waits_too(gateway_factory: GatewayFactory, kind: str) -> None:
    """Scenarios 24 and 26 of Apache Iggy: the successor waits for the same partition."""
    stage = Stage(gateway_factory(QUICK), kind)
    try:
        first = stage.read_everything()
        second = stage.start("second")
        stage.wait_pending(2.0)
        second.thread.awaits_partitions = True
        second.thread.stop()
        stage.board.wait_settled({"first"}, PARTITIONS)
        stage.start("third")
        stage.wait_pending(2.0)
        first.finish()
        stage.board.wait_settled({"first", "third"}, PARTITIONS)
        assert counted(stage.gateway, "group_handoffs_forced_total") == {"": 0.0}
    finally:
        stage.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_partition_that_was_never_read_moves_at_once(gateway_factory: GatewayFactory, kind: str) -> None:
    """Scenario 20 of Apache Iggy: the partition has no records."""
    stage = Stage(gateway_factory(QUICK), kind)
    try:
        stage.start("first")
        stage.board.wait_settled({"first"}, PARTITIONS)
        stage.start("second")
        stage.board.wait_settled({"first", "second"}, PARTITIONS)
        stage.start("third")
        stage.board.wait_settled({"first", "second", "third"}, PARTITIONS)
        assert counted(stage.gateway, "group_handoffs_forced_total") == {"": 0.0}
    finally:
        stage.stop()


@pytest.mark.parametrize("kind", ["cooperative", "consumer"])
def test_four_to_two_to_four_over_sixteen_partitions(gateway_factory: GatewayFactory, kind: str) -> None:
    """Scenario 33 of Apache Iggy. The test also checks that the intervals of ownership do not overlap."""
    stage = Stage(gateway_factory(QUICK), kind, partitions=16)
    try:
        for name in "abcd":
            stage.start(name)
        stage.board.wait_settled(set("abcd"), 16)
        for name in "cd":
            stage.workers[name].thread.stop()
        stage.board.wait_settled(set("ab"), 16)
        for name in "ef":
            stage.start(name)
        stage.board.wait_settled(set("abef"), 16)
    finally:
        stage.stop()


@pytest.mark.parametrize("kind", ["cooperative", "consumer"])
def test_partitions_added_during_a_handoff_are_assigned(gateway_factory: GatewayFactory, kind: str) -> None:
    """Scenario 14 of Apache Iggy."""
    stage = Stage(gateway_factory(QUICK), kind)
    try:
        first = stage.read_everything()
        stage.start("second")
        stage.wait_pending(2.0)
        admin = AdminClient({"bootstrap.servers": stage.gateway.bootstrap})
        admin.create_partitions([NewPartitions(stage.topic, 8)])[stage.topic].result(30)
        first.finish()
        stage.board.wait_settled({"first", "second"}, 8)
        assert not stage.board.duplicates()
    finally:
        stage.stop()


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_a_removed_member_cannot_commit_and_joins_again(gateway: GatewayProcess, assignor: str) -> None:
    """The member commits before its next heartbeat, so the refused commit is how it learns of its removal."""
    topic, group = create_topic(gateway.bootstrap, PARTITIONS), f"g-{uuid.uuid4().hex[:8]}"
    produce(gateway.bootstrap, topic)
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": gateway.bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 15_000,
            "heartbeat.interval.ms": 5_000,
            "partition.assignment.strategy": assignor,
        }
    )
    read: list[tuple[int, int]] = []

    def read_all() -> None:
        read.clear()

        def look() -> bool:
            message = consumer.poll(0.1)
            if message is not None and message.error() is None:
                read.append((message.partition() or 0, message.offset() or 0))
            return len(set(read)) == RECORDS

        wait_for(look, f"{len(read)} records")

    def commit() -> None:
        reached = {partition: offset + 1 for partition, offset in sorted(read)}
        offsets = [confluent_kafka.TopicPartition(topic, *each) for each in reached.items()]
        consumer.commit(offsets=offsets, asynchronous=False)

    def member_id() -> str:
        (member,) = admin.describe_consumer_groups([group])[group].result(30).members
        return member.member_id

    admin = AdminClient({"bootstrap.servers": gateway.bootstrap})
    remover = kafka.KafkaAdminClient(bootstrap_servers=gateway.bootstrap)
    try:
        consumer.subscribe([topic])
        read_all()
        evicted = member_id()
        remover.remove_group_members(group, [kafka.admin.MemberToRemove(member_id=evicted)])
        with pytest.raises(confluent_kafka.KafkaException) as refused:
            commit()
        assert refused.value.args[0].code() in EVICTED
        read_all()
        assert member_id() != evicted
        commit()
    finally:
        remover.close()
        close(consumer)
