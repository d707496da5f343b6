"""Failures of another gateway's consumer groups that users met with stock clients (SeaweedFS #9143 and its follow-ups).

None of them may occur here. `tests/coordinator/test_seaweed.py` checks the same on the coordinator alone.
"""

# pyright: reportAttributeAccessIssue=false
# kafka-python's type stubs belong to an older release.

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kafka
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from kafka.errors import InconsistentGroupProtocolError, NoError, UnknownMemberIdError

from tests.clients.consumers import CONSUMERS, ConfluentConsumer
from tests.clients.scoreboard import ConsumerThread, Scoreboard
from tests.clients.topics import create_topic
from tests.gateway_process import ROOT, GatewayFactory, GatewayProcess


class Crowd:
    """Consumers of one group and topic that end with the test."""

    def __init__(self, bootstrap: str, partitions: int) -> None:
        self.bootstrap = bootstrap
        self.topic = create_topic(bootstrap, partitions)
        self.group = f"g-{uuid.uuid4().hex[:8]}"
        self.partitions = partitions
        self.board = Scoreboard()
        self.members: dict[str, ConsumerThread] = {}

    def start(self, name: str, kind: str = "confluent-range", **settings: str | int) -> ConsumerThread:
        client, assignor = CONSUMERS[kind]
        given = (name, self.board, self.bootstrap, self.topic, self.group, assignor)
        if settings:
            assert client is ConfluentConsumer
            member = ConfluentConsumer(*given, {key.replace("_", "."): value for key, value in settings.items()})
        else:
            member = client(*given)
        self.members[name] = member
        member.start()
        return member

    def settle(self, *names: str, timeout_s: float = 60) -> None:
        self.board.wait_settled(set(names or self.members), self.partitions, timeout_s)

    def stop(self, name: str) -> None:
        self.members.pop(name).stop()

    @contextmanager
    def doomed(self, **settings: str | int) -> Iterator[subprocess.Popen[str]]:
        """Run a member that owns every partition, in a process of its own."""
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.clients.doomed", self.bootstrap, self.topic, self.group),
                *(f"{key.replace('_', '.')}={value}" for key, value in settings.items()),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == ",".join(str(index) for index in range(self.partitions))
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def crowd(gateway: GatewayProcess) -> Iterator[Crowd]:
    with crowd_on(gateway, 4) as made:
        yield made


@contextmanager
def crowd_on(gateway: GatewayProcess, partitions: int) -> Iterator[Crowd]:
    made = Crowd(gateway.bootstrap, partitions)
    try:
        yield made
    finally:
        for name in list(made.members):
            made.stop(name)


def test_two_consumers_with_one_client_id_are_two_members(crowd: Crowd) -> None:
    for name in ("c1", "c2"):
        crowd.start(name, "kafka-python-range")
    crowd.settle()
    admin = AdminClient({"bootstrap.servers": crowd.bootstrap})
    described = admin.describe_consumer_groups([crowd.group])[crowd.group].result(60)
    assert len({member.member_id for member in described.members}) == 2
    assert {member.client_id for member in described.members} == {"same-for-all"}


def test_a_static_member_that_restarts_keeps_its_assignment(gateway: GatewayProcess) -> None:
    """A static member restarts within its session and keeps its assignment. The other member sees no rebalance."""
    with crowd_on(gateway, 4) as crowd:
        crowd.start("stays", group_instance_id="stays")
        crowd.settle()
        crowd.start("returns", group_instance_id="returns")
        crowd.settle()
        owned = dict(crowd.board.owned)
        crowd.board.revoked.clear()
        crowd.stop("returns")
        crowd.start("returns", group_instance_id="returns")
        crowd.board.wait_for(lambda: crowd.board.owned == owned, "the assignment of before")
        assert [name for name, _ in crowd.board.revoked if name == "stays"] == []


def test_no_member_ends_with_an_empty_assignment(gateway: GatewayProcess) -> None:
    """Four members join at once, five times. A member that asks before the leader has assigned must not get an empty
    answer."""
    for _ in range(5):
        with crowd_on(gateway, 4) as crowd:
            for index in range(4):
                crowd.start(f"c{index}", "aiokafka-roundrobin" if index % 2 else "confluent-roundrobin")
            crowd.settle(timeout_s=20)


def test_a_rebalance_loses_no_partition(crowd: Crowd) -> None:
    """Members are asked to revoke before a partition moves, so they can commit. No partition is lost without a
    revocation.
    """
    for count in range(1, 4):
        crowd.start(f"c{count}")
        crowd.settle()
    for count in range(3, 1, -1):
        crowd.stop(f"c{count}")
        crowd.settle()
    assert crowd.board.revoked
    assert crowd.board.lost == []


@pytest.mark.parametrize("kind", ["kafka-python-range", "confluent-range", "aiokafka-range"])
def test_a_member_that_leaves_is_removed_at_once(gateway: GatewayProcess, kind: str) -> None:
    """kafka-python sends LeaveGroup 5, librdkafka and aiokafka send LeaveGroup 1. No test member waits for a session to
    end, because the session timeout is five minutes.
    """
    with crowd_on(gateway, 4) as crowd:
        patient: dict[str, Any] = {"session_timeout_ms": 300_000, "max_poll_interval_ms": 300_000}
        crowd.start("stays", **patient)
        crowd.settle()
        crowd.start("goes", kind, **(patient if kind.startswith("confluent") else {}))
        crowd.settle()
        crowd.stop("goes")
        crowd.settle("stays", timeout_s=20)


def test_a_refused_member_disturbs_nobody(crowd: Crowd) -> None:
    crowd.start("c1", "kafka-python-range")
    crowd.settle()
    crowd.board.revoked.clear()
    stranger = kafka.KafkaConsumer(
        crowd.topic,
        bootstrap_servers=crowd.bootstrap,
        group_id=crowd.group,
        partition_assignment_strategy=[RoundRobinPartitionAssignor],
    )
    try:
        with pytest.raises(InconsistentGroupProtocolError):
            stranger.poll(20_000)
    finally:
        stranger.close()
    admin = AdminClient({"bootstrap.servers": crowd.bootstrap})
    described = admin.describe_consumer_groups([crowd.group])[crowd.group].result(30)
    assert (described.state.name, len(described.members)) == ("STABLE", 1)
    assert crowd.board.revoked == []
    assert RangePartitionAssignor.name == described.partition_assignor


def test_an_admin_removes_several_members_at_once(gateway: GatewayProcess) -> None:
    with crowd_on(gateway, 4) as crowd:
        for name in ("a", "b"):
            crowd.start(name, group_instance_id=name, session_timeout_ms=300_000, max_poll_interval_ms=300_000)
        crowd.start("c")
        crowd.settle()
        for name in ("a", "b"):
            crowd.stop(name)  # A static member sends no request when it closes.
        admin = kafka.KafkaAdminClient(bootstrap_servers=crowd.bootstrap)
        try:
            results = admin.remove_group_members(
                crowd.group, [kafka.admin.MemberToRemove(group_instance_id=name) for name in ("a", "b", "nobody")]
            )
        finally:
            admin.close()
        assert results == {"a": NoError, "b": NoError, "nobody": UnknownMemberIdError}
        crowd.settle("c", timeout_s=20)


def test_a_killed_member_is_removed_after_its_session(crowd: Crowd) -> None:
    with crowd.doomed(session_timeout_ms=6000) as process:
        process.kill()
        crowd.start("heir")
        crowd.settle("heir", timeout_s=20)


def test_a_killed_members_partitions_move_long_before_its_session_ends(gateway_factory: GatewayFactory) -> None:
    """The kernel closes the killed member's connection, and no other connection sends requests for the member within
    the grace period.
    """
    gateway = gateway_factory({"group.connection.grace.ms": "500"})
    with (
        crowd_on(gateway, 4) as crowd,
        crowd.doomed(session_timeout_ms=300_000, max_poll_interval_ms=300_000) as process,
    ):
        process.kill()
        crowd.start("heir", session_timeout_ms=300_000, max_poll_interval_ms=300_000)
        crowd.settle("heir", timeout_s=20)


def test_a_commit_in_the_revoke_callback_is_where_the_next_owner_starts(gateway: GatewayProcess) -> None:
    """The next owner starts at the offset that a member commits in its revoke callback."""
    with crowd_on(gateway, 1) as crowd:
        producer = kafka.KafkaProducer(bootstrap_servers=crowd.bootstrap)
        for index in range(10):
            producer.send(crowd.topic, str(index).encode())
        producer.close()

        class Careful(ConfluentConsumer):
            def on_revoke(self, consumer: object, partitions: list[TopicPartition]) -> None:
                self.consumer.commit(asynchronous=False)
                super().on_revoke(consumer, partitions)

        no_auto_commit = {"enable.auto.commit": "false"}
        careful = Careful("careful", crowd.board, crowd.bootstrap, crowd.topic, crowd.group, "range", no_auto_commit)
        crowd.members["careful"] = careful
        careful.start()
        crowd.board.wait_values({str(index).encode() for index in range(10)})
        crowd.stop("careful")
        admin = AdminClient({"bootstrap.servers": crowd.bootstrap})
        asked = [ConsumerGroupTopicPartitions(crowd.group)]
        committed = admin.list_consumer_group_offsets(asked)[crowd.group].result(30).topic_partitions
        assert [(partition.partition, partition.offset) for partition in committed] == [(0, 10)]
