"""The coordinator lets a member finish and commit its work on a partition before another member receives the partition.
These tests check what a rebalance repeats if work is not committed yet, and which requests do not wait.
"""

# pyright: reportAttributeAccessIssue=false
# kafka-python's type stubs declare only a part of its admin client.

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import kafka
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.clients.consumers import AiokafkaConsumer, ConfluentConsumer
from tests.clients.scoreboard import Ownership, Scoreboard
from tests.clients.topics import create_topic
from tests.clients.workers import KINDS, PARTITIONS, QUICK, RECORDS, Stage, Worker, counted, produce, set_of_group
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.steps.waiting import wait_for

BUSY_RECORDS = 20_000
WORK_S = 0.001
"""Seconds of work on each record. The application processes far fewer records than its client has queued."""
BUSY_RECORDS_PER_S = 20
SOON_S = 15.0
"""Half of the time that the coordinator may wait for a handoff."""
AT_ONCE_S = 2.0


@contextmanager
def producing(bootstrap: str, topic: str, records_per_s: float) -> Iterator[None]:
    """Produce records to all partitions, at this rate, in the background."""
    ended = threading.Event()

    def produce_evenly() -> None:
        producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
        number = 0
        while not ended.wait(1 / records_per_s):
            producer.produce(topic, b"x", partition=number % PARTITIONS)
            producer.poll(0)
            number += 1
        assert producer.flush(30) == 0

    thread = threading.Thread(target=produce_evenly)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("kind", KINDS)
def test_drained_partitions_are_read_once(gateway_factory: GatewayFactory, kind: str) -> None:
    """The first consumer has received everything and committed nothing when the second one joins."""
    gateway = gateway_factory(QUICK)
    topic, group, board = create_topic(gateway.bootstrap, PARTITIONS), f"g-{uuid.uuid4().hex[:8]}", Scoreboard()
    set_of_group(gateway.bootstrap, group, group_handoff_mode="drain")
    produce(gateway.bootstrap, topic)
    first = Worker(kind, "first", board, gateway.bootstrap, topic, group)
    second = Worker(kind, "second", board, gateway.bootstrap, topic, group)
    try:
        first.thread.start()
        board.wait_for(lambda: len(board.deliveries) == RECORDS, "all records")
        second.thread.start()
        wait_for(lambda: counted(gateway, "group_handoffs_pending") == {"": 2.0}, "no partition is waited for")
        assert all(each.member == "first" for each in board.deliveries)
        first.finish()
        board.wait_settled({"first", "second"}, PARTITIONS)
        produce(gateway.bootstrap, topic)
        board.wait_for(lambda: len(board.deliveries) >= 2 * RECORDS, "the new records")
        first.finish()
        second.finish()
    finally:
        second.thread.stop()
        first.thread.stop()
    assert not board.failures
    # An eager consumer also repeats records of partitions that it keeps, because it begins again at the committed
    # offset. This repetition is not caused by a handoff.
    given = {
        name: {(e.partition, e.offset) for e in board.deliveries if e.member == name} for name in ("first", "second")
    }
    assert not given["first"] & given["second"]
    assert set(counted(gateway, "group_handoffs_total")) <= {"drained", "acked", "source_left", "superseded"}
    assert counted(gateway, "group_handoffs_forced_total") == {"": 0.0}


@pytest.mark.parametrize("kind", ["eager", "cooperative"])
def test_a_held_member_of_a_short_session_stays_a_member(gateway_factory: GatewayFactory, kind: str) -> None:
    """The work that the new owner waits for takes longer than two sessions."""
    session_s = 3.0
    session = {"session_timeout_ms": str(int(session_s * 1000))}
    stage = Stage(gateway_factory({**QUICK, "group.min.session.timeout.ms": "1000"}), kind)
    admin = AdminClient({"bootstrap.servers": stage.gateway.bootstrap})

    def member_ids() -> set[str]:
        described = admin.describe_consumer_groups([stage.group])[stage.group].result(30)
        return {member.member_id for member in described.members}

    try:
        first = stage.read_everything(**session)
        stage.start("second", **session)
        stage.wait_pending(2.0)
        began_s, held = time.monotonic(), member_ids()
        assert len(held) == 2
        stage.board.wait_settled({"first", "second"}, PARTITIONS)
        held_s = time.monotonic() - began_s
        assert session_s / 4 < held_s < session_s + 3, "not held, or for longer than librdkafka waits for an answer"
        revocations = list(stage.board.revoked)
        wait_for(lambda: time.monotonic() - began_s > 2 * session_s, "two sessions have not passed")
        assert counted(stage.gateway, "group_handoffs_pending") == {"": 2.0}, "it waits no more"
        assert member_ids() == held
        first.finish()
        wait_for(lambda: counted(stage.gateway, "group_handoffs_pending") == {"": 0.0}, "it waits still")
        produce(stage.gateway.bootstrap, stage.topic)
        stage.board.wait_for(lambda: any(each.member == "second" for each in stage.board.deliveries), "it reads")
        assert member_ids() == held
        assert stage.board.revoked == revocations
        assert stage.board.lost == []
    finally:
        stage.stop()
    given = {
        name: {(e.partition, e.offset) for e in stage.board.deliveries if e.member == name}
        for name in ("first", "second")
    }
    assert not given["first"] & given["second"]


@pytest.mark.parametrize("kind", KINDS)
def test_prefetched_records_do_not_delay_a_handoff(gateway: GatewayProcess, kind: str) -> None:
    """The gateway has served a busy topic to its end, but the application has processed little of it."""
    client, assignor = KINDS[kind]
    base: type[ConfluentConsumer] = client

    class Busy(base):  # type: ignore[valid-type, misc]
        def poll_once(self) -> None:
            super().poll_once()
            time.sleep(WORK_S)

    topic, group, board = create_topic(gateway.bootstrap, PARTITIONS), f"g-{uuid.uuid4().hex[:8]}", Ownership()
    produce(gateway.bootstrap, topic, BUSY_RECORDS)
    forced = counted(gateway, "group_handoffs_forced_total")
    readers = [Busy(name, board, gateway.bootstrap, topic, group, assignor) for name in ("first", "second")]
    try:
        readers[0].start()
        board.wait_for(lambda: len(board.deliveries) >= 100, "the first reads")
        readers[1].start()
        board.wait_for(lambda: any(each.member == "second" for each in board.deliveries), "the second reads", SOON_S)
        board.wait_settled({"first", "second"}, PARTITIONS, SOON_S)
        assert len(board.deliveries) < BUSY_RECORDS / 2, "it was not busy"
    finally:
        for reader in reversed(readers):
            reader.stop()
    assert not board.failures
    assert not board.overlaps
    assert not board.duplicates()
    assert counted(gateway, "group_handoffs_forced_total") == forced


@pytest.mark.parametrize("kind", KINDS)
def test_discarded_prefetched_records_do_not_delay_a_handoff_in_mode_drain(
    gateway_factory: GatewayFactory, kind: str
) -> None:
    """Records arrive faster than the first consumer works, so it queues more than its application receives. When a
    partition is revoked, the consumer commits what its application has received. It commits nothing before that.
    """
    gateway = gateway_factory(QUICK)
    topic, group, board = create_topic(gateway.bootstrap, PARTITIONS), f"g-{uuid.uuid4().hex[:8]}", Ownership()
    set_of_group(gateway.bootstrap, group, group_handoff_mode="drain")
    client, assignor = KINDS[kind]
    base: type[ConfluentConsumer] = client

    class Busy(base):  # type: ignore[valid-type, misc]
        def poll_once(self) -> None:
            super().poll_once()
            time.sleep(1 / BUSY_RECORDS_PER_S)

        def on_revoke(self, consumer: object, partitions: list[TopicPartition]) -> None:
            revoked = {each.partition for each in partitions}
            given = [each for each in board.deliveries if each.member == self.name and each.partition in revoked]
            reached = {each.partition: each.offset + 1 for each in given}
            offsets = [TopicPartition(topic, *each) for each in reached.items()]
            if offsets:
                self.consumer.commit(offsets=offsets, asynchronous=False)
            super().on_revoke(consumer, partitions)

    settings = {"enable.auto.commit": "false"}
    readers = [Busy(name, board, gateway.bootstrap, topic, group, assignor, settings) for name in ("first", "second")]
    try:
        with producing(gateway.bootstrap, topic, records_per_s=2 * BUSY_RECORDS_PER_S):
            readers[0].start()
            board.wait_for(lambda: len(board.deliveries) >= 2 * BUSY_RECORDS_PER_S, "the first reads")
            readers[1].start()
            second = "second"
            board.wait_for(lambda: any(each.member == second for each in board.deliveries), "the second reads", SOON_S)
            board.wait_settled({"first", "second"}, PARTITIONS, SOON_S)
    finally:
        for reader in reversed(readers):
            reader.stop()
    assert not board.failures
    assert not board.overlaps
    given = {
        name: {(e.partition, e.offset) for e in board.deliveries if e.member == name} for name in ("first", "second")
    }
    assert not given["first"] & given["second"]
    assert "processed" in counted(gateway, "group_handoffs_total")
    assert counted(gateway, "group_handoffs_forced_total") == {"": 0.0}


def test_an_admin_client_that_describes_a_waiting_group_does_not_wait(gateway_factory: GatewayFactory) -> None:
    """Two admin clients describe the group while its members wait for partitions."""
    stage = Stage(gateway_factory(QUICK), "eager")
    bootstrap, group = stage.gateway.bootstrap, stage.group
    admin = AdminClient({"bootstrap.servers": bootstrap, "client.id": "same-for-all"})
    other = kafka.KafkaAdminClient(bootstrap_servers=bootstrap, client_id="same-for-all")
    asked = ConsumerGroupTopicPartitions(group, [TopicPartition(stage.topic, each) for each in range(PARTITIONS)])

    def offsets() -> None:
        answer = admin.list_consumer_group_offsets([asked])[group].result(30)
        assert all(each.error is None for each in answer.topic_partitions or ()), answer

    looks: dict[str, Callable[[], object]] = {
        "offsets": offsets,
        "members": lambda: admin.describe_consumer_groups([group])[group].result(30),
        "groups": lambda: admin.list_consumer_groups().result(30),
        "offsets by kafka-python": lambda: other.list_group_offsets([group]),
    }
    try:
        first = stage.read_everything()
        stage.start("second")
        stage.wait_pending(2.0)
        for name, look in looks.items():
            began_s = time.monotonic()
            look()
            assert time.monotonic() - began_s < AT_ONCE_S, name
        stage.wait_pending(2.0)
        first.finish()
        stage.board.wait_settled({"first", "second"}, PARTITIONS)
    finally:
        other.close()
        stage.stop()


def test_a_client_that_cannot_retry_continues_when_the_coordinator_can_hold_it_no_longer(
    gateway_factory: GatewayFactory,
) -> None:
    """aiokafka gives up at UNSTABLE_OFFSET_COMMIT, so it cannot retry."""
    stage = Stage(gateway_factory(QUICK), "eager")
    target = AiokafkaConsumer("second", stage.board, stage.gateway.bootstrap, stage.topic, stage.group, "range")
    try:
        stage.read_everything()
        target.start()
        stage.wait_pending(2.0)
        stage.board.wait_for(
            lambda: any(each.member == "second" for each in stage.board.deliveries), "it goes on", SOON_S
        )
        wait_for(lambda: "client_cap" in stage.ends(), "it is not counted")
    finally:
        target.stop()
        stage.stop()
