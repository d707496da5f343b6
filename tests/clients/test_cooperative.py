"""Which partitions librdkafka's members revoke, and which they lose.

The one idea: callbacks are all that an application sees of a rebalance. The application receives partitions one by one,
in increments. It loses them only if the coordinator has removed its member, and then no other member loses any.
"""

# pyright: reportAttributeAccessIssue=false
# kafka-python's type stubs declare only a part of its admin client.

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import confluent_kafka
import kafka
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions  # pyright: ignore[reportPrivateImportUsage]

from tests.clients.consumers import ConfluentConsumer
from tests.clients.rolling import Rolling
from tests.clients.scoreboard import Ownership
from tests.clients.topics import create_topic
from tests.gateway_process import ROOT, GatewayFactory, GatewayProcess

PARTITIONS = 4
SESSION_S = 3
REFRESH = {"topic.metadata.refresh.interval.ms": 500}
KINDS = ["range", "cooperative-sticky"]
REFUSALS = ("Unknown member", "generation id is not valid")
"""librdkafka's error texts for UNKNOWN_MEMBER_ID and ILLEGAL_GENERATION."""
TOPIC_FACTOR = 100


# --- incremental assignments ------------------------------------------------------------------------------------------


class Reader(ConfluentConsumer):
    """A reader of topics named `…-0`, `…-1` and so on. On the scoreboard, partition 2 of the second topic has the
    number 102.
    """

    def on_assign(self, _consumer: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self.board.add(self.name, self.numbered(partitions))

    def on_revoke(self, _consumer: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        self.board.remove(self.name, self.numbered(partitions))

    def numbered(self, partitions: list[confluent_kafka.TopicPartition]) -> set[int]:
        return {TOPIC_FACTOR * int(each.topic.rpartition("-")[2]) + each.partition for each in partitions}

    def change_to(self, *topics: str) -> None:
        """Change the subscription, from the polling thread."""
        self.changes.put(topics)

    def open(self) -> None:
        self.changes: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        super().open()

    def poll_once(self) -> None:
        # A subscribe call would cancel the LeaveGroup of a closing consumer.
        if not self.changes.empty() and not self.stopping:
            topics = list(self.changes.get())
            self.consumer.subscribe(topics, on_assign=self.on_assign, on_revoke=self.on_revoke, on_lost=self.on_lost)
        super().poll_once()


class Scene:
    """Two cooperative members that own the topic `name(0)`. They may receive further topics."""

    def __init__(self, gateway: GatewayProcess, *, pattern: bool = False) -> None:
        self.bootstrap, self.group = gateway.bootstrap, f"g-{uuid.uuid4().hex[:8]}"
        self.prefix = f"increments-{self.group}"
        self.board = Ownership()
        self.admin = AdminClient({"bootstrap.servers": self.bootstrap})
        self.create(0)
        subscription = f"^{self.prefix}-.*" if pattern else self.name(0)
        self.readers = [
            Reader(name, self.board, self.bootstrap, subscription, self.group, "cooperative-sticky", REFRESH)
            for name in ("a", "b")
        ]
        for reader in self.readers:
            reader.start()
        self.board.wait_settled({"a", "b"}, PARTITIONS)
        self.board.revoked.clear()

    def name(self, number: int) -> str:
        return f"{self.prefix}-{number}"

    def create(self, number: int) -> None:
        create_topic(self.bootstrap, PARTITIONS, self.name(number))

    def partitions(self, *numbers: int) -> set[int]:
        return {TOPIC_FACTOR * number + partition for number in numbers for partition in range(PARTITIONS)}

    def wait_shared(self, *numbers: int) -> None:
        """Wait until every partition of these topics, and no other partition, has exactly one owner, and all members
        own equally many.
        """
        wanted = sorted(self.partitions(*numbers))
        half = len(wanted) // len(self.readers)

        def shared() -> bool:
            owned = self.board.owned.values()
            return sorted(each for some in owned for each in some) == wanted and all(
                len(some) == half for some in owned
            )

        self.board.wait_for(shared, f"topics {numbers} are shared")

    def close(self) -> None:
        for reader in self.readers:
            reader.stop()
        assert not self.board.failures
        assert self.board.overlaps == []
        assert self.board.repeated == [], "what a member has was given to it anew"
        assert self.board.lost == []


@contextmanager
def scene_on(gateway: GatewayProcess, *, pattern: bool = False) -> Iterator[Scene]:
    scene = Scene(gateway, pattern=pattern)
    try:
        yield scene
    finally:
        scene.close()


def test_added_partitions_come_as_an_increment(gateway: GatewayProcess) -> None:
    with scene_on(gateway) as scene:
        topic = scene.name(0)
        scene.admin.create_partitions([NewPartitions(topic, 2 * PARTITIONS)])[topic].result(30)
        scene.board.wait_settled({"a", "b"}, 2 * PARTITIONS)
        assert scene.board.revoked == []


def test_a_topic_that_a_pattern_matches_comes_as_an_increment(gateway: GatewayProcess) -> None:
    with scene_on(gateway, pattern=True) as scene:
        scene.create(1)
        scene.wait_shared(0, 1)
        assert scene.board.revoked == []


def test_a_changed_subscription_moves_only_what_it_changes(gateway: GatewayProcess) -> None:
    """Each member in turn subscribes to a further topic, owns all its partitions, and then unsubscribes from it."""
    with scene_on(gateway) as scene:
        scene.create(1)
        for reader in scene.readers:
            for topics in ((0, 1), (0,)):
                before = dict(scene.board.owned)
                scene.board.revoked.clear()
                reader.change_to(*(scene.name(number) for number in topics))
                scene.wait_shared(*topics)
                assert len(topics) == 1 or scene.board.owned[reader.name] == scene.partitions(1)
                for name, owned in before.items():
                    kept = owned & scene.board.owned[name]
                    assert kept or name == reader.name
                    assert not kept & scene.board.revoked_of(name), f"{name} was asked to revoke what it keeps"


# --- what is lost -----------------------------------------------------------------------------------------------------


class Refusals(logging.Handler):
    """Collect the errors from the coordinator that end a membership, as the client logs them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if any(refusal in line for refusal in REFUSALS):
            self.seen.append(line)


class Listener(ConfluentConsumer):
    """A consumer that also collects librdkafka's log messages about its group."""

    def open(self) -> None:
        self.refusals = Refusals()
        logger = logging.Logger(self.name, logging.DEBUG)
        logger.addHandler(self.refusals)
        self.settings = {**self.settings, "debug": "cgrp", "logger": logger}
        super().open()


class Members(Rolling):
    board: Ownership

    def __init__(self, gateway: GatewayProcess, assignor: str) -> None:
        super().__init__(gateway)
        self.board, self.assignor = Ownership(), assignor
        self.admin = AdminClient({"bootstrap.servers": gateway.bootstrap})
        self.listeners: list[Listener] = []

    def join(self, name: str) -> Listener:
        member = Listener(name, self.board, self.gateway.bootstrap, self.topic, self.group, self.assignor, REFRESH)
        self.members.append(member)
        self.listeners.append(member)
        member.start()
        return member

    def refused(self) -> dict[str, list[str]]:
        return {each.name: each.refusals.seen for each in self.listeners if each.refusals.seen}

    def member_ids(self) -> set[str]:
        described = self.admin.describe_consumer_groups([self.group])[self.group].result(30)
        return {member.member_id for member in described.members}

    def add_partitions(self, count: int) -> None:
        self.admin.create_partitions([NewPartitions(self.topic, count)])[self.topic].result(30)


@pytest.mark.parametrize("assignor", KINDS)
def test_no_member_is_refused_while_members_join_and_leave(gateway_factory: GatewayFactory, assignor: str) -> None:
    members = Members(gateway_factory(), assignor)
    with members.load():
        members.join("a")
        members.join("b")
        members.settle()
        members.join("c")
        members.settle()
        members.members.pop().stop()
        members.settle()
        members.add_partitions(2 * PARTITIONS)
        members.board.wait_settled({"a", "b"}, 2 * PARTITIONS)
        members.members.pop(0).stop()
        members.board.wait_settled({"b"}, 2 * PARTITIONS)
    assert members.refused() == {}
    assert members.board.overlaps == []


@pytest.mark.parametrize("assignor", KINDS)
def test_a_removed_member_loses_its_partitions_and_no_other_member_does(
    gateway_factory: GatewayFactory, assignor: str
) -> None:
    """An administrator removes the member. Its client learns this from the error code of its next heartbeat."""
    members = Members(gateway_factory(), assignor)
    try:
        members.join("removed")
        members.settle()
        (member_id,) = members.member_ids()
        members.join("a")
        members.join("b")
        members.settle()
        had = members.board.owned["removed"]
        admin = kafka.KafkaAdminClient(bootstrap_servers=members.gateway.bootstrap)
        try:
            admin.remove_group_members(members.group, [kafka.admin.MemberToRemove(member_id=member_id)])
        finally:
            admin.close()
        members.board.wait_for(lambda: bool(members.board.lost), "partitions were lost")
        members.settle()
    finally:
        for member in members.members:
            member.stop()
    assert members.board.lost == [("removed", had)]
    assert set(members.refused()) == {"removed"}
    assert not members.board.failures


@pytest.mark.parametrize("assignor", KINDS)
def test_a_member_whose_session_expires_loses_its_partitions_and_no_other_member_does(
    gateway_factory: GatewayFactory, assignor: str
) -> None:
    """The process is stopped while its connections stay open. It continues when another member owns its partitions."""
    members = Members(gateway_factory({"group.min.session.timeout.ms": "1000"}), assignor)
    settings = (f"session.timeout.ms={SESSION_S * 1000}", f"partition.assignment.strategy={assignor}")
    arguments = (members.gateway.bootstrap, members.topic, members.group, *settings)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.clients.doomed", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    guard = threading.Timer(60, process.kill)
    guard.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "0,1,2,3\n"
        members.join("stays")
        half = PARTITIONS // 2
        members.board.wait_for(lambda: len(members.board.owned.get("stays", ())) == half, "each has a half")
        others = set(range(PARTITIONS)) - members.board.owned["stays"]
        process.send_signal(signal.SIGSTOP)
        members.board.wait_settled({"stays"}, PARTITIONS)
        process.send_signal(signal.SIGCONT)
        lost = next(line for line in process.stdout if line.startswith("lost"))
        members.board.wait_for(lambda: len(members.board.owned["stays"]) == half, "it has come back")
    finally:
        guard.cancel()
        process.kill()
        process.wait()
        for member in members.members:
            member.stop()
    assert lost.removeprefix("lost ").strip() == ",".join(str(each) for each in sorted(others))
    assert members.board.lost == []
    assert members.refused() == {}
    assert not members.board.failures
