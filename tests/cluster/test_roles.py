"""Nodes that are only brokers or only controllers (`process.roles`), each a process of its own."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

from gateway.cluster.jobs import Job
from gateway.cluster.leases import SHARDS
from tests.cluster.conftest import metric
from tests.gateway_process import GatewayFactory, GatewayProcess, free_ports
from tests.steps.waiting import wait_for

TTL_MS = 1_000
PATIENCE_S = 30.0
JOBS = len(Job)
FOLLOWED = '"internal topic followed"'
Start = Callable[..., GatewayProcess]


@pytest.fixture
def start(gateway_factory: GatewayFactory, database_url: str) -> Start:
    """Start a node of one role."""

    def start(role: str) -> GatewayProcess:
        (port,) = free_ports(1)
        name = {"broker": "PLAINTEXT", "controller": "CONTROLLER"}[role]
        return gateway_factory(
            {
                "process.roles": role,
                "listeners": f"{name}://127.0.0.1:{port}",
                "controller.listener.names": "CONTROLLER",
            },
            database_url=database_url,
            environment={"SLUICE_NODE_TTL_MS": str(TTL_MS)},
            coordinated=role == "broker",
        )

    return start


def until_equal(look: Callable[[], object], expected: object) -> None:
    wait_for(look, f"{expected} is there", holds=lambda found: found == expected)


def jobs(node: GatewayProcess) -> int:
    return int(metric(node, "sluice_job_leases"))


def groups(node: GatewayProcess) -> int:
    return int(metric(node, "sluice_coordinator_leases"))


def is_ready(node: GatewayProcess) -> bool:
    with urllib.request.urlopen(f"{node.metrics_url}/readyz", timeout=10) as answer:
        return answer.status == 200


def round_trip(bootstrap: str, topic: str, count: int) -> list[bytes | None]:
    """Produce values and read them in a consumer group."""
    producer = Producer({"bootstrap.servers": bootstrap})
    for number in range(count):
        producer.produce(topic, str(number).encode())
    assert producer.flush(PATIENCE_S) == 0
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": topic, "auto.offset.reset": "earliest"})
    try:
        consumer.subscribe([topic])
        read: list[bytes | None] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(read) < count:
            assert time.monotonic() < deadline, read
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                read.append(message.value())
        return read
    finally:
        consumer.close()


def read_offsets_topic(bootstrap: str) -> None:
    """Read the offsets topic until it has a record."""
    settings = {"bootstrap.servers": bootstrap, "group.id": "reader", "auto.offset.reset": "earliest"}
    consumer = Consumer({**settings, "enable.auto.commit": False})
    try:
        consumer.subscribe(["__consumer_offsets"])
        deadline = time.monotonic() + PATIENCE_S
        while (message := consumer.poll(1.0)) is None or message.error() is not None:
            assert time.monotonic() < deadline
    finally:
        consumer.close()


def test_a_controller_does_the_jobs_and_a_broker_serves(start: Start) -> None:
    """The controller runs the background jobs, and the broker serves clients. The order of their starts does not
    matter. If the controller is killed, the broker runs the jobs.
    """
    broker = start("broker")
    until_equal(lambda: (jobs(broker), groups(broker)), (JOBS, SHARDS))
    controller = start("controller")
    until_equal(lambda: (jobs(controller), jobs(broker)), (JOBS, 0))
    assert (groups(controller), groups(broker)) == (0, SHARDS)
    assert is_ready(controller)
    assert is_ready(broker)
    assert sorted(round_trip(broker.bootstrap, "t", 20), key=str) == sorted((b"%d" % n for n in range(20)), key=str)
    cluster = AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(timeout=PATIENCE_S)
    assert [(each.host, each.port) for each in cluster.brokers.values()] == [
        ("127.0.0.1", int(broker.bootstrap.rpartition(":")[2]))
    ]
    read_offsets_topic(broker.bootstrap)
    until_equal(lambda: FOLLOWED in broker.log_tail(), True)
    assert FOLLOWED not in controller.log_tail(), "it could write nothing of it"
    controller.kill()
    until_equal(lambda: jobs(broker), JOBS)
    assert round_trip(broker.bootstrap, "u", 1) == [b"0"]
    controller.start()
    until_equal(lambda: (jobs(controller), jobs(broker)), (JOBS, 0))
    controller.stop()
    until_equal(lambda: jobs(broker), JOBS)


def test_a_controller_waits_for_brokers_and_coordinates_no_group(start: Start) -> None:
    controller = start("controller")
    until_equal(lambda: jobs(controller), JOBS)
    assert groups(controller) == 0
    assert is_ready(controller)
    broker = start("broker")
    assert round_trip(broker.bootstrap, "t", 1) == [b"0"]
    assert (groups(controller), groups(broker), jobs(broker)) == (0, SHARDS, 0)
    assert f"Sluice is a controller at {controller.bootstrap}." in controller.log_tail()
