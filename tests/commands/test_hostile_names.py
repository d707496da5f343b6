"""Names and texts that would move a terminal's cursor, or that would make a command fail with a traceback."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from tests.commands.terminal import Prompt
from tests.commands.terminal import sluice as sluice
from tests.commands.terminal import topic as topic
from tests.gateway_process import GatewayProcess

CLEAR, CSI, DELETE = "\x1b[2J", "\x9b", "\x7f"


def commit(gateway: GatewayProcess, group: str, topic: str) -> None:
    consumer = Consumer({"bootstrap.servers": gateway.bootstrap, "group.id": group})
    consumer.commit(offsets=[TopicPartition(topic, 0, 0)], asynchronous=False)
    consumer.close()


def test_an_error_that_suggests_a_hostile_group_is_escaped(
    sluice: Prompt, gateway: GatewayProcess, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(gateway, f"billing{CLEAR}", topic)
    said = sluice("groups", "describe", "billings[2J", code=1)
    assert "did you mean" in said
    assert "\\x1b[2J" in said
    assert "\x1b" not in said


def test_a_record_of_a_year_that_no_calendar_has_is_shown(sluice: Prompt, gateway: GatewayProcess, topic: str) -> None:
    sluice("topics", "alter", topic, "--set", f"message.timestamp.after.max.ms={2**63 - 1}")
    producer = Producer({"bootstrap.servers": gateway.bootstrap})
    producer.produce(topic, "v", partition=0, timestamp=1_700_000_000_000_000_000)
    assert producer.flush(10) == 0
    assert "1700000000000000000 ms" in sluice("topics", "tail", topic)


def test_json_holds_no_control_character(sluice: Prompt, gateway: GatewayProcess, topic: str) -> None:
    group = f"json{CSI}2J{DELETE}"
    commit(gateway, group, topic)
    text = sluice("groups", "list", "--json")
    assert CSI not in text
    assert DELETE not in text
    assert group in [row["group"] for row in sluice.json("groups", "list")]
