"""Records that Spark's Kafka connector cannot read, because their timestamp does not fit a Spark timestamp.

The one idea: on such a record the connector fails the whole batch and does not name the record. So after such a failure
the job reads the batch's ranges with librdkafka, and finds the records. They become dead letters, and the batch is read
without them. If there are many of them, the batch ends early and the next one continues there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, Message, TopicPartition
from pyspark.errors import PySparkException

from pipeline.archive.plan import Range
from pipeline.kafka import Partition, offset_of
from pipeline.schema import TIMESTAMP_TYPES

# Spark counts microseconds in 64 bits.
MAX_MS = (2**63 - 1) // 1000
MAX_UNFIT = 1_000
"""Maximal number of such records in a batch, because the driver holds them in memory."""
MAX_HOLES = 32
"""Maximal number of holes in a range. The connector reads each piece between two holes separately."""
CHUNK_RECORDS = 10_000
POLL_SECONDS, SILENCE_SECONDS = 1.0, 60.0

Row = tuple[Any, ...]
"""A row of `DEAD_LETTER`."""


def is_cause(error: Exception) -> bool:
    """Return whether a batch failed because a timestamp in milliseconds overflows as microseconds."""
    text = f"{error}\n{getattr(error, '_stackTrace', '') if isinstance(error, PySparkException) else ''}"
    return "long overflow" in text


@dataclass(slots=True)
class Found:
    """The result of a search: the `holes` in a batch's ranges, the dead letters for these holes, and the searched parts
    of the ranges.
    """

    holes: list[Range] = field(default_factory=list[Range])
    letters: list[Row] = field(default_factory=list[Row])
    ranges: list[Range] = field(default_factory=list[Range])


def find(settings: Mapping[str, str], ranges: Sequence[Range], *, read_committed: bool) -> Found:
    """Find the records of `ranges` whose timestamp does not fit. Raise KafkaException if the cluster is silent or
    refuses.
    """
    consumer = Consumer(
        {
            **settings,
            "group.id": "sluice-archive",  # librdkafka requires a group id; no group is joined
            "enable.auto.commit": "false",
            "enable.partition.eof": "true",
            "auto.offset.reset": "error",
            "isolation.level": "read_committed" if read_committed else "read_uncommitted",
        }
    )
    found = Found()
    ended: set[Partition] = set()
    try:
        for each in ranges:
            key = (each.topic, each.partition)
            if len(found.letters) == MAX_UNFIT or key in ended:
                continue
            searched = _search(consumer, each, found)
            found.ranges.append(searched)
            if searched.end < each.end:
                # Further pieces of the partition belong to the next batch, as the rest of this one does.
                ended.add(key)
    finally:
        consumer.close()
    return found


def _search(consumer: Consumer, whole: Range, found: Found) -> Range:
    """Add the records of one range to `found`. Return the range. If it has too many such records, it ends early."""
    holes: list[Range] = []
    for message in _messages(consumer, whole):
        if abs(message.timestamp()[1]) <= MAX_MS:
            continue
        offset = offset_of(message)
        if holes and holes[-1].end == offset:
            holes[-1] = replace(holes[-1], end=offset + 1)
        else:
            holes.append(replace(whole, start=offset, end=offset + 1))
        found.letters.append(_dead_letter(message))
        if len(holes) == MAX_HOLES or len(found.letters) == MAX_UNFIT:
            whole = replace(whole, end=offset + 1)
            break
    found.holes += holes
    return whole


def _messages(consumer: Consumer, part: Range) -> Iterator[Message]:
    where = TopicPartition(part.topic, part.partition, part.start)
    consumer.assign([where])
    position, heard = part.start, time.monotonic()
    while position < part.end:
        messages = consumer.consume(min(CHUNK_RECORDS, part.end - position), POLL_SECONDS)
        if not messages:
            # The range may end with offsets that have no record. Then the position passes the end, although no message
            # arrives.
            here = consumer.position([where])[0].offset
            if here != OFFSET_INVALID and here >= part.end:
                return
            if time.monotonic() - heard > SILENCE_SECONDS:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{part} is silent at {position}"))
            continue
        heard = time.monotonic()
        for message in messages:
            error = message.error()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    return
                raise KafkaException(error)
            position = offset_of(message) + 1
            if position > part.end:
                return
            yield message


def _dead_letter(message: Message) -> Row:
    kind, time_ms = message.timestamp()
    reason = f"the timestamp {time_ms} ms does not fit a Spark timestamp; the archive does not hold the record"
    named = message.headers()
    headers = None if named is None else [tuple(header) for header in named]
    return (
        message.topic(), message.partition(), message.offset(), None, TIMESTAMP_TYPES[kind], message.key(),
        message.value(), headers, None, reason,
    )  # fmt: skip
