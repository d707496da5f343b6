"""Read topics with a stock consumer."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

DEADLINE_S = 60


def read(consumer: Consumer, topic: str, count: int, *, partitions: int = 3, none_more_s: float = 0.0) -> list[Any]:
    """Return the first `count` messages of the topic. Fail if these messages do not arrive in time, or if another
    message arrives within `none_more_s`.
    """
    consumer.assign([TopicPartition(topic, index, 0) for index in range(partitions)])
    found: list[Any] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < deadline_s, f"{len(found)} of {count} messages came: {found}"
        message = consumer.poll(0.1)
        if message is not None:
            assert message.error() is None, message.error()
            found.append(message)
    if none_more_s:
        message = consumer.poll(none_more_s)
        assert message is None, f"an unexpected message: {message and message.value()!r}"
    return found


def values(messages: list[Any]) -> list[Any]:
    """Return the messages' values: bytes, or None for a tombstone. The type stubs do not declare them."""
    return [message.value() for message in messages]


def error(refused: pytest.ExceptionInfo[Exception]) -> Any:
    """Return Postgres' error. asyncpg sets its sqlstate and hint without declaring them."""
    return refused.value
