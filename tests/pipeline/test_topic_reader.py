"""Messages of librdkafka as `verify` reads them: records, the end of a log, and errors in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from pipeline.verify.sums import time_sum
from pipeline.verify.topic import Chunk, _read, chunk_of

END_OF_PARTITION, OUT_OF_RANGE = -191, -140
"""Two error codes of librdkafka."""


@dataclass(frozen=True)
class Handed:
    """A message as librdkafka returns it. A message that stands for an error has a timestamp without a type."""

    at: int
    failed: KafkaError | None = None

    def offset(self) -> int:
        return self.at

    def error(self) -> KafkaError | None:
        return self.failed

    def timestamp(self) -> tuple[int, int]:
        return (0, -1) if self.failed else (1, 1_000 + self.at)

    def key(self) -> bytes | None:
        return None

    def value(self) -> bytes:
        return b"the words of an error" if self.failed else b"%d" % self.at

    def headers(self) -> None:
        return None


class Handing:
    """A consumer that returns the given lists of messages, one list per call."""

    def __init__(self, *lists: list[Handed]) -> None:
        self._lists = list(lists)

    def assign(self, partitions: list[TopicPartition]) -> None:
        assert [each.offset for each in partitions] == [0]

    def consume(self, _count: int, _seconds: float) -> list[Message]:
        return cast(list[Message], self._lists.pop(0))


def read(end: int, *lists: list[Handed]) -> list[Chunk]:
    found = _read(cast(Consumer, cast(Any, Handing(*lists))), "a", 0, 0, end)
    return [chunk_of(messages, times) for messages, times in found]


def records(*offsets: int) -> list[Handed]:
    return [Handed(offset) for offset in offsets]


def offsets(chunks: list[Chunk]) -> list[int]:
    return [offset for chunk in chunks for offset in chunk.offsets.tolist()]


def test_the_end_of_the_log_ends_a_piece_behind_what_came_before_it() -> None:
    chunks = read(9, records(0, 1, 4), [*records(5, 6), Handed(7, KafkaError(END_OF_PARTITION))])
    assert offsets(chunks) == [0, 1, 4, 5, 6]
    assert chunks[1].sums[0].tolist() == [time_sum(1_005, 1), time_sum(1_006, 1)]


def test_records_behind_the_end_of_a_piece_are_not_summed() -> None:
    chunks = read(5, records(0, 1, 4, 5, 6))
    assert offsets(chunks) == [0, 1, 4]
    assert [len(column) for column in chunks[0].sums] == [3, 3, 3, 3]


def test_an_error_among_records_is_never_taken_for_one() -> None:
    with pytest.raises(KafkaException):
        read(9, [*records(0, 1), Handed(2, KafkaError(OUT_OF_RANGE)), *records(3)])
