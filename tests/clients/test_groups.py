"""Consumer groups of stock clients with 1 → 2 → 4 → 1 members: one owner per partition, each record read once."""

from __future__ import annotations

import uuid

import pytest
from confluent_kafka import Producer

from tests.clients.consumers import CONSUMERS, ConfluentConsumerProtocol
from tests.clients.feeds import PARTITIONS, Feed
from tests.clients.scoreboard import ConsumerThread, Scoreboard
from tests.clients.topics import create_topic
from tests.gateway_process import GatewayProcess


@pytest.mark.parametrize("kind", sorted(CONSUMERS))
def test_one_owner_per_partition_through_1_2_4_1_members(gateway: GatewayProcess, kind: str) -> None:
    client, assignor = CONSUMERS[kind]
    topic = create_topic(gateway.bootstrap, PARTITIONS)
    board, feed, group = Scoreboard(), Feed(gateway.bootstrap, topic), f"g-{uuid.uuid4().hex[:8]}"
    members: list[ConsumerThread] = []

    def start() -> None:
        member = client(f"c{len(members) + 1}", board, gateway.bootstrap, topic, group, assignor)
        members.append(member)
        member.start()

    try:
        start()
        board.wait_settled({"c1"}, PARTITIONS)
        feed.send(40)
        start()
        feed.send(40)
        board.wait_settled({"c1", "c2"}, PARTITIONS)
        start()
        start()
        feed.send(40)
        board.wait_settled({"c1", "c2", "c3", "c4"}, PARTITIONS)
        feed.send(40)
        board.wait_values(feed.values)
        for member in members[1:]:
            member.stop()
        board.wait_settled({"c1"}, PARTITIONS)
        feed.send(40)
        board.wait_values(feed.values)
    finally:
        for member in members:
            member.stop()
    assert not board.failures
    assert board.duplicates() == []


def test_cooperative_members_keep_what_they_retain(gateway: GatewayProcess) -> None:
    """KIP-429 with librdkafka, 6 → 3+3 → 2+2+2 partitions. No member is asked to revoke a partition that it keeps."""
    topic = create_topic(gateway.bootstrap, 6)
    board, group = Scoreboard(), f"g-{uuid.uuid4().hex[:8]}"
    members: list[ConsumerThread] = []
    try:
        for count in (1, 2, 3):
            before = dict(board.owned)
            board.revoked.clear()
            client, assignor = CONSUMERS["confluent-cooperative-sticky"]
            member = client(f"c{count}", board, gateway.bootstrap, topic, group, assignor)
            members.append(member)
            member.start()
            board.wait_settled({f"c{index}" for index in range(1, count + 1)}, 6)
            for name, owned in before.items():
                kept = owned & board.owned[name]
                given_up = frozenset().union(*(partitions for owner, partitions in board.revoked if owner == name))
                assert not kept & given_up, f"{name} was asked to revoke {kept & given_up}, which it keeps"
    finally:
        for member in members:
            member.stop()


@pytest.mark.parametrize("kind", ["confluent-range", "kafka-python-range", "aiokafka-range"])
def test_the_next_consumer_resumes_at_the_committed_offset(gateway: GatewayProcess, kind: str) -> None:
    """The next consumer does not read again what the first consumer committed when it closed. It reads later records
    once.
    """
    client, assignor = CONSUMERS[kind]
    topic = create_topic(gateway.bootstrap, PARTITIONS)
    board, feed, group = Scoreboard(), Feed(gateway.bootstrap, topic), f"g-{uuid.uuid4().hex[:8]}"
    for name in ("first", "second"):
        feed.send(20)
        member = client(name, board, gateway.bootstrap, topic, group, assignor)
        member.start()
        try:
            board.wait_values(feed.values)
        finally:
            member.stop()
    assert not board.failures
    assert board.duplicates() == []
    assert len(board.deliveries) == len(feed.values)


def test_three_consumers_on_one_partition_read_each_record_once(gateway: GatewayProcess) -> None:
    topic = create_topic(gateway.bootstrap, 1)
    board, group = Scoreboard(), f"g-{uuid.uuid4().hex[:8]}"
    client, assignor = CONSUMERS["confluent-range"]
    members = [client(f"c{index}", board, gateway.bootstrap, topic, group, assignor) for index in range(3)]
    producer = Producer({"bootstrap.servers": gateway.bootstrap})
    values = {str(index).encode() for index in range(9)}
    try:
        for member in members:
            member.start()
        board.wait_for(lambda: sum(len(owned) for owned in board.owned.values()) == 1, "the partition has one owner")
        for value in values:
            producer.produce(topic, value)
        assert producer.flush(30) == 0
        board.wait_values(values)
    finally:
        for member in members:
            member.stop()
    assert not board.failures
    assert len(board.deliveries) == 9


def test_a_pattern_of_the_consumer_protocol_matches_topics_created_later(gateway: GatewayProcess) -> None:
    """librdkafka sends a topic name that begins with `^` as a pattern, and the coordinator matches it by RE2."""
    board, group, prefix = Scoreboard(), f"g-{uuid.uuid4().hex[:8]}", f"logs-{uuid.uuid4().hex[:8]}"
    settings: dict[str, str | int] = {"topic.metadata.refresh.interval.ms": 1_000}
    client = ConfluentConsumerProtocol("c1", board, gateway.bootstrap, f"^{prefix}-.*", group, "uniform", settings)
    producer = Producer({"bootstrap.servers": gateway.bootstrap})
    client.start()
    try:
        for number in range(2):
            value = str(number).encode()
            producer.produce(create_topic(gateway.bootstrap, 1, f"{prefix}-{number}"), value)
            assert producer.flush(30) == 0
            board.wait_values({value})
    finally:
        client.stop()
    assert not board.failures


def test_a_static_member_of_the_consumer_protocol_returns_to_its_partitions(gateway: GatewayProcess) -> None:
    topic = create_topic(gateway.bootstrap, PARTITIONS)
    board, group = Scoreboard(), f"g-{uuid.uuid4().hex[:8]}"

    def member(name: str, instance: str) -> ConsumerThread:
        settings: dict[str, str | int] = {"group.instance.id": instance}
        return ConfluentConsumerProtocol(name, board, gateway.bootstrap, topic, group, "uniform", settings)

    members = [member("c1", "one"), member("c2", "two")]
    try:
        for each in members:
            each.start()
        board.wait_settled({"c1", "c2"}, PARTITIONS)
        held, others = board.owned["c1"], board.owned["c2"]
        board.revoked.clear()
        members[0].stop()
        members.append(member("c1again", "one"))
        members[-1].start()
        board.wait_for(lambda: board.owned.get("c1again") == held, "the same partitions for the same instance")
        assert board.owned["c2"] == others
        assert all(name != "c2" for name, _ in board.revoked)
    finally:
        for each in members:
            each.stop()
