"""The observer, which reports violations of the rebalance protocol, and its guard, with stock clients. The observer
reports nothing while clients follow the protocol. If a leader violates it, each partition still has one owner.
"""

from __future__ import annotations

import contextlib
import urllib.request
import uuid
from typing import Any, ClassVar

import confluent_kafka
import pytest
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

from gateway.cli import main
from tests.clients.consumers import CONSUMERS, ConfluentConsumer, KafkaPythonConsumer
from tests.clients.scoreboard import ConsumerThread, Scoreboard
from tests.clients.topics import create_topic
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.steps.waiting import wait_for

PARTITIONS = 6


class EagerLeader(CooperativeStickyAssignor):
    """An assignor that claims to be cooperative, but assigns partitions that another member still claims."""

    def assign(self, cluster: Any, members: Any) -> Any:
        return StickyPartitionAssignor.assign(self, cluster, members)  # pyright: ignore[reportCallIssue]


class RudeConsumer(KafkaPythonConsumer):
    ASSIGNORS: ClassVar = {"cooperative-sticky": EagerLeader}


def violations(gateway: GatewayProcess) -> dict[str, float]:
    """Violations by kind, from the node's metrics."""
    with urllib.request.urlopen(f"{gateway.metrics_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line.startswith("sluice_group_protocol_violations_total{"))
    return {name.split('"')[1]: float(value) for name, _, value in samples}


def withheld(gateway: GatewayProcess) -> float:
    with urllib.request.urlopen(f"{gateway.metrics_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    name = "sluice_group_partitions_withheld_total "
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.mark.parametrize(
    ("kinds", "may_be_seen"),
    [
        (("confluent-cooperative-sticky",) * 3, set[str]()),
        (("confluent-range", "confluent-range", "kafka-python-range"), set[str]()),
        # kafka-python may join again with claims that are older than its last revocation, which costs a generation.
        (("kafka-python-cooperative-sticky", "confluent-cooperative-sticky"), {"undelivered_claim"}),
    ],
    ids=["cooperative", "eager", "mixed-clients"],
)
def test_stock_clients_cause_only_the_known_violations(
    gateway_factory: GatewayFactory, kinds: tuple[str, ...], may_be_seen: set[str]
) -> None:
    gateway = gateway_factory({"group.cooperative.guard": "true"})
    topic = create_topic(gateway.bootstrap, PARTITIONS)
    board, group = Scoreboard(), f"g-{uuid.uuid4().hex[:8]}"
    members: list[ConsumerThread] = []
    try:
        for kind in kinds:
            client, assignor = CONSUMERS[kind]
            members.append(client(f"c{len(members)}", board, gateway.bootstrap, topic, group, assignor))
            members[-1].start()
            board.wait_settled({member.name for member in members}, PARTITIONS)
        members[-1].stop()
        board.wait_settled({member.name for member in members[:-1]}, PARTITIONS)
    finally:
        for member in members:
            member.stop()
    assert not board.failures
    assert set(violations(gateway)) <= may_be_seen
    assert "withheld from" not in gateway.log_text()


class Misused(ConfluentConsumer):
    """A consumer that calls assign in the callback of a cooperative protocol, which librdkafka refuses."""

    def on_assign(self, consumer: Any, partitions: Any) -> None:
        with contextlib.suppress(confluent_kafka.KafkaException):
            consumer.assign(partitions)


def test_a_member_that_misuses_assign_is_reported_with_its_client_id(
    gateway_factory: GatewayFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = gateway_factory({"group.initial.rebalance.delay.ms": "0"})
    topic, group = create_topic(gateway.bootstrap, PARTITIONS), f"g-{uuid.uuid4().hex[:8]}"
    member = Misused("misused", Scoreboard(), gateway.bootstrap, topic, group, "cooperative-sticky")
    member.awaits_partitions = True
    try:
        member.start()
        wait_for(lambda: violations(gateway).get("nothing_read") == 1, "it is not seen")
    finally:
        member.stop()

    def told() -> str:
        assert gateway.database_url is not None
        assert main(["groups", "history", group, "--database-url", gateway.database_url]) == 0
        return capsys.readouterr().out

    wait_for(lambda: "client same-for-all" in told(), "it is not in the history")
    assert "misuses assign" in told()


@pytest.mark.parametrize("guard", [True, False], ids=["guarded", "reported"])
def test_a_leader_that_moves_a_claimed_partition_is_reported_or_corrected_by_the_guard(
    gateway_factory: GatewayFactory, guard: bool
) -> None:
    gateway = gateway_factory({"group.cooperative.guard": "true"} if guard else {})
    topic = create_topic(gateway.bootstrap, PARTITIONS)
    board, group = Scoreboard(), f"g-{uuid.uuid4().hex[:8]}"
    leader = RudeConsumer("leader", board, gateway.bootstrap, topic, group, "cooperative-sticky")
    follower = ConfluentConsumer("follower", board, gateway.bootstrap, topic, group, "cooperative-sticky")
    try:
        leader.start()
        board.wait_settled({"leader"}, PARTITIONS)
        follower.start()
        board.wait_settled({"leader", "follower"}, PARTITIONS)
    finally:
        follower.stop()
        leader.stop()
    assert not board.failures
    # Because of the guard, no partition moved in the end.
    assert ("moved_while_claimed" in violations(gateway)) is not guard
    assert ("withheld from" in gateway.log_text()) is guard
    assert (withheld(gateway) > 0) is guard
