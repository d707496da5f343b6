"""Consumers that commit when a test finishes their work, and a group of them in mode `drain`.

The one idea: a consumer hands its records to a worker and commits when the worker is done, as an application with a
pool of workers does. If its partition moves before that commit, another member reads the record again.
"""

from __future__ import annotations

import threading
import urllib.request
import uuid

import confluent_kafka
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,  # pyright: ignore[reportPrivateImportUsage]
    ConfigEntry,  # pyright: ignore[reportPrivateImportUsage]
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)

from tests.clients.consumers import ConfluentConsumer, ConfluentConsumerProtocol
from tests.clients.scoreboard import Ownership, Scoreboard
from tests.clients.topics import create_topic
from tests.gateway_process import GatewayProcess
from tests.steps.waiting import wait_for

PARTITIONS = 4
RECORDS = 40
QUICK = {"group.initial.rebalance.delay.ms": "0"}
KINDS: dict[str, tuple[type[ConfluentConsumer], str]] = {
    "eager": (ConfluentConsumer, "range"),
    "cooperative": (ConfluentConsumer, "cooperative-sticky"),
    "consumer": (ConfluentConsumerProtocol, "uniform"),
}


class Worker:
    """A consumer with a pool of workers. `finish` commits every record that it received, even if another member owns
    the partition by then."""

    def __init__(
        self, kind: str, name: str, board: Scoreboard, bootstrap: str, topic: str, group: str, **more: str
    ) -> None:
        """`more` are settings of the client, with underscores in place of dots."""
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
                if commit.is_set() and self.has_committed():
                    commit.clear()
                    committed.set()

            def has_committed(self) -> bool:
                """Commit. Return False if the answer to a heartbeat is about to change the member's epoch."""
                offsets = [confluent_kafka.TopicPartition(topic, *each) for each in done.items()]
                try:
                    self.consumer.commit(offsets=offsets, asynchronous=False)
                except confluent_kafka.KafkaException as refused:
                    if refused.args[0].code() == confluent_kafka.KafkaError.STALE_MEMBER_EPOCH:
                        return False
                    raise
                return True

        settings = {"enable.auto.commit": "false", "topic.metadata.refresh.interval.ms": "1000"}
        settings |= {setting.replace("_", "."): value for setting, value in more.items()}
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


class Stage:
    """A group of workers in mode `drain`, on a gateway of its own. The test decides when the workers commit."""

    def __init__(self, gateway: GatewayProcess, kind: str, *, partitions: int = PARTITIONS, **configs: str) -> None:
        self.gateway, self.kind, self.partitions = gateway, kind, partitions
        self.topic, self.group = create_topic(gateway.bootstrap, partitions), f"g-{uuid.uuid4().hex[:8]}"
        self.board = Ownership()
        self.workers: dict[str, Worker] = {}
        set_of_group(gateway.bootstrap, self.group, group_handoff_mode="drain", **configs)

    def start(self, name: str, **more: str) -> Worker:
        worker = Worker(self.kind, name, self.board, self.gateway.bootstrap, self.topic, self.group, **more)
        self.workers[name] = worker
        worker.thread.start()
        return worker

    def read_everything(self, name: str = "first", **more: str) -> Worker:
        """Produce records and let one member receive them all without a commit."""
        produce(self.gateway.bootstrap, self.topic)
        worker = self.start(name, **more)
        self.board.wait_for(lambda: len(self.board.deliveries) == RECORDS, "all records")
        return worker

    def wait_pending(self, partitions: float) -> None:
        wait_for(lambda: counted(self.gateway, "group_handoffs_pending") == {"": partitions}, "nobody waits")

    def ends(self) -> set[str]:
        return set(counted(self.gateway, "group_handoffs_total"))

    def stop(self) -> None:
        for worker in self.workers.values():
            if worker.thread.is_alive():
                worker.thread.stop()
        assert not self.board.failures
        assert not self.board.overlaps
