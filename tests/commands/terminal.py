"""A command line, and clients whose groups and topics it can show."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from gateway.cli import main
from tests.gateway_process import GatewayProcess


class Prompt:
    """Runs commands in this process and keeps their output."""

    def __init__(self, bootstrap: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._bootstrap = bootstrap
        self._capsys = capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        self._capsys.readouterr()
        assert main([*words, "-b", self._bootstrap]) == code
        captured = self._capsys.readouterr()
        return captured.err if code and not captured.out else captured.out

    def json(self, *words: str) -> list[dict[str, Any]]:
        return json.loads(self(*words, "--json"))


@pytest.fixture
def sluice(gateway: GatewayProcess, capsys: pytest.CaptureFixture[str]) -> Prompt:
    return Prompt(gateway.bootstrap, capsys)


@pytest.fixture
def topic(sluice: Prompt) -> str:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    sluice("topics", "create", name, "--partitions", "2", "--set", "retention.ms=3600000")
    return name


def produce(gateway: GatewayProcess, topic: str, partition: int, values: list[str], **more: Any) -> None:
    producer = Producer({"bootstrap.servers": gateway.bootstrap})
    for number, value in enumerate(values):
        producer.produce(topic, value, key=f"k{number}", partition=partition, timestamp=1000 * (number + 1), **more)
    assert producer.flush(30) == 0


@contextmanager
def consumer(gateway: GatewayProcess, group: str, topic: str) -> Iterator[Consumer]:
    member = Consumer(
        {
            "bootstrap.servers": gateway.bootstrap,
            "group.id": group,
            "client.id": "tester",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    member.subscribe([topic])
    try:
        yield member
    finally:
        member.close()


def consume(member: Consumer, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        message = member.poll(30)
        assert message is not None, f"only {found}"
        assert message.error() is None
        found.append((message.value() or b"").decode())
    return found
