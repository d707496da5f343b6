"""Nodes behind one host with a port per node: stock clients reach every node through it and need no other address."""

from __future__ import annotations

import time

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

from tests.closing import close
from tests.cluster.balancer import Balancer
from tests.cluster.conftest import QUICK_TTL
from tests.conftest import gateways
from tests.gateway_process import free_ports
from tests.postgres import Databases, LoopThread
from tests.steps.waiting import wait_for

TOPIC, GROUP, PARTITIONS, RECORDS = "balanced", "readers", 6, 300
READ_SECONDS = 90.0


def test_clients_use_one_address_with_a_port_per_node(postgres: Databases, database_url: str) -> None:
    """The bootstrap port leads to any node. Clients continue after a node has died."""
    loop = LoopThread()
    own, (entrance, *outside) = free_ports(3), free_ports(4)
    balancer = Balancer(loop, {entrance: own, **{port: [target] for port, target in zip(outside, own, strict=True)}})
    bootstrap = f"127.0.0.1:{entrance}"

    def produce(first: int) -> None:
        producer = Producer({"bootstrap.servers": bootstrap, "client.id": "producer"})
        for number in range(first, first + RECORDS):
            producer.produce(TOPIC, str(number).encode(), partition=number % PARTITIONS)
        assert producer.flush(READ_SECONDS) == 0

    try:
        with gateways(postgres) as factory:
            nodes = [
                factory(
                    {
                        "listeners": f"PLAINTEXT://127.0.0.1:{target}",
                        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
                        "num.partitions": str(PARTITIONS),
                    },
                    database_url=database_url,
                    environment=QUICK_TTL,
                )
                for target, port in zip(own, outside, strict=True)
            ]
            admin = AdminClient({"bootstrap.servers": bootstrap})

            def listed() -> set[int]:
                return {broker.port for broker in admin.list_topics(timeout=30).brokers.values()}

            wait_for(lambda: listed() == set(outside), "the balancer's ports are not all listed")
            produce(0)
            assert all(balancer.accepted[port] for port in outside), "partitions of some node were not written to"
            consumer = Consumer(
                {
                    "bootstrap.servers": bootstrap,
                    "group.id": GROUP,
                    "auto.offset.reset": "earliest",
                    "topic.metadata.refresh.interval.ms": 5000,
                }
            )
            got: set[int] = set()

            def read(count: int) -> None:
                deadline = time.monotonic() + READ_SECONDS
                while len(got) < count:
                    assert time.monotonic() < deadline, f"{len(got)} of {count} records"
                    message = consumer.poll(1)
                    if message is not None and message.error() is None:
                        got.add(int(message.value() or b"-1"))

            try:
                consumer.subscribe([TOPIC])
                read(RECORDS)
                nodes[1].kill()
                produce(RECORDS)
                read(2 * RECORDS)
            finally:
                close(consumer)
            assert got == set(range(2 * RECORDS))
    finally:
        loop.close()
