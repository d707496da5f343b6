"""Names and texts that would move the cursor of a terminal, or end a command with a traceback."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, TopicPartition

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


def test_json_holds_no_control_character(sluice: Prompt, gateway: GatewayProcess, topic: str) -> None:
    group = f"json{CSI}2J{DELETE}"
    commit(gateway, group, topic)
    text = sluice("groups", "list", "--json")
    assert CSI not in text
    assert DELETE not in text
    assert group in [row["group"] for row in sluice.json("groups", "list")]
