"""Partitions that move between stock consumers: who waits for whom, and what is read twice.

The one idea: a consumer hands its records to somebody else and commits when it is told that the work is done, as one
with a pool of workers does. What is read twice is then what was given away before that.
"""

from __future__ import annotations

import threading
import time
import urllib.request
import uuid
from collections.abc import Callable

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from tests.clients.consumers import ConfluentConsumer, ConfluentConsumerProtocol
from tests.clients.scoreboard import Scoreboard
from tests.clients.topics import create_topic
from tests.gateway_process import GatewayFactory, GatewayProcess

PARTITIONS = 4
RECORDS = 40
KINDS: dict[str, tuple[type[ConfluentConsumer], str]] = {
    "eager": (ConfluentConsumer, "range"),
    "cooperative": (ConfluentConsumer, "cooperative-sticky"),
    "consumer": (ConfluentConsumerProtocol, "uniform"),
}


class Worker:
    """A consumer with a pool of workers: `finish` commits all that it was given, whoever owns it by then."""

    def __init__(self, kind: str, name: str, board: Scoreboard, bootstrap: str, topic: str, group: str) -> None:
        client, assignor = KINDS[kind]
        base: type[ConfluentConsumer] = client
        done: dict[int, int] = {}
        commit, committed = threading.Event(), threading.Event()

        class Pooled(base):  # type: ignore[valid-type, misc]
            def poll_once(self) -> None:
                before = len(board.deliveries)
                super().poll_once()
                for each in board.deliveries[before:]:
                    if each.member == name:
                        done[each.partition] = each.offset + 1
                if commit.is_set():
                    commit.clear()
                    offsets = [confluent_kafka.TopicPartition(topic, *each) for each in done.items()]
                    self.consumer.commit(offsets=offsets, asynchronous=False)
                    committed.set()

        settings = {"enable.auto.commit": "false"}
        self.thread = Pooled(name, board, bootstrap, topic, group, assignor, settings)
        self._commit, self._committed = commit, committed

    def finish(self) -> None:
        self._committed.clear()
        self._commit.set()
        assert self._committed.wait(30), "not committed"


def produce(bootstrap: str, topic: str, records: int = RECORDS) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    for number in range(records):
        producer.produce(topic, str(number).encode(), partition=number % PARTITIONS)
    assert producer.flush(30) == 0


def set_of_group(bootstrap: str, group: str, **configs: str) -> None:
    entries = [
        ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
        for name, value in configs.items()
    ]
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(30)


def counted(gateway: GatewayProcess, name: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{gateway.metrics_url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line.startswith(f"sluice_{name}"))
    return {sample.partition("{")[2].strip('}"').partition('="')[2]: float(value) for sample, _, value in samples}


def until(holds: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_drained_partitions_are_read_once(gateway_factory: GatewayFactory, kind: str) -> None:
    """The first consumer was given everything and has committed nothing when the second one joins."""
    gateway = gateway_factory({"group.initial.rebalance.delay.ms": "0"})
    topic, group, board = create_topic(gateway.bootstrap, PARTITIONS), f"g-{uuid.uuid4().hex[:8]}", Scoreboard()
    set_of_group(gateway.bootstrap, group, group_handoff_mode="drain")
    produce(gateway.bootstrap, topic)
    first = Worker(kind, "first", board, gateway.bootstrap, topic, group)
    second = Worker(kind, "second", board, gateway.bootstrap, topic, group)
    try:
        first.thread.start()
        board.wait_for(lambda: len(board.deliveries) == RECORDS, "all records")
        second.thread.start()
        until(lambda: counted(gateway, "group_handoffs_pending") == {"": 2.0}, "no partition is waited for")
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
    assert not board.duplicates()
    assert set(counted(gateway, "group_handoffs_total")) <= {"drained", "acked", "source_left", "superseded"}
    assert counted(gateway, "group_handoffs_forced_total") == {"": 0.0}
