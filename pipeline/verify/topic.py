"""The topic's side of a proof: Spark's workers read its records with librdkafka and sum them.

The one idea: a piece of work is a range of offsets of one partition, read by a consumer that joins no group. Reading
ends at the range's last offset, at the end of the log, or with an error. It never ends early without an error.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import methodcaller
from typing import Any, TypeAlias, cast
from zlib import crc32

import numpy as np
import pyarrow as pa
from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, Message, TopicPartition

from pipeline.kafka import offset_of
from pipeline.verify.sums import BLOCK, COLUMNS, NULL_SUM, TIME_MODULUS, bytes_sum, headers_sum

CHUNK_RECORDS = 10_000
POLL_SECONDS = 1.0
SILENCE_SECONDS = 60.0

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_SUMS = [(f"{name}_sum", pa.int64()) for name in COLUMNS]
RECORDS_OUT = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), *_SUMS])
BLOCKS_OUT = pa.schema(
    [("topic", pa.string()), ("partition", pa.int32()), ("block", pa.int64()), ("records", pa.int64()), *_SUMS]
)


@dataclass(frozen=True, slots=True)
class TopicReader:
    """Reads topics in Spark's workers: it receives pieces of work and returns sums. `settings` are librdkafka's."""

    settings: Mapping[str, str]
    read_committed: bool = True

    def blocks(self, pieces: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield sums per block. Pieces must end at borders of blocks, but a range itself may begin and end anywhere."""
        for topic, partition, read in self.read(pieces):
            sums: dict[int, list[int]] = {}
            for messages, times in read:
                _add(sums, chunk_of(messages, times))
            rows = sorted(sums.items())
            columns = [[topic] * len(rows), [partition] * len(rows), [block for block, _ in rows]]
            columns += [[found[index] for _, found in rows] for index in range(1 + len(COLUMNS))]
            yield pa.record_batch(columns, schema=BLOCKS_OUT)

    def records(self, pieces: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield sums per record."""
        for topic, partition, read in self.read(pieces):
            for messages, times in read:
                chunk = chunk_of(messages, times)
                names = [topic] * len(chunk.offsets)
                partitions = [partition] * len(chunk.offsets)
                columns = [pa.array(each) for each in (chunk.offsets, *chunk.sums)]
                yield pa.record_batch([pa.array(names), pa.array(partitions, pa.int32()), *columns], schema=RECORDS_OUT)

    def read(self, pieces: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, int, Iterator[Read]]]:
        """Yield the topic and partition of each piece, and its records. The caller must read these before the next
        piece.
        """
        consumer = Consumer(
            {
                **self.settings,
                "group.id": "sluice-verify",  # librdkafka requires a group id; no group is joined
                "enable.auto.commit": "false",
                "enable.partition.eof": "true",
                "auto.offset.reset": "error",
                "isolation.level": "read_committed" if self.read_committed else "read_uncommitted",
                "check.crcs": "true",
                "fetch.queue.backoff.ms": "5",
                # A few large answers cost the broker least. But records that are fetched beyond a piece's end are
                # wasted.
                "max.partition.fetch.bytes": str(4 << 20),
                "queued.min.messages": "20000",
                "queued.max.messages.kbytes": "32768",
            }
        )
        try:
            for batch in pieces:
                for piece in batch.to_pylist():
                    topic, partition = piece["topic"], piece["partition"]
                    yield topic, partition, _read(consumer, topic, partition, piece["start"], piece["end"])
        finally:
            consumer.close()


Read: TypeAlias = tuple[list[Message], Integers]
"""Messages, each with its timestamp and the type of the timestamp."""


@dataclass(slots=True)
class Chunk:
    offsets: Integers
    sums: list[Integers] = field(default_factory=list[Integers])


_offset, _key, _value = methodcaller("offset"), methodcaller("key"), methodcaller("value")
_headers, _timestamp, _error = methodcaller("headers"), methodcaller("timestamp"), methodcaller("error")


def _read(consumer: Consumer, topic: str, partition: int, start: int, end: int) -> Iterator[Read]:
    """Yield the records from `start` to before `end`. Raise KafkaException if the cluster is silent or refuses."""
    where = TopicPartition(topic, partition, start)
    consumer.assign([where])
    position, heard = start, time.monotonic()
    while position < end:
        messages = consumer.consume(min(CHUNK_RECORDS, end - position), POLL_SECONDS)
        if not messages:
            # If the last offsets of the range have no record, the position passes them although no message arrives.
            here = consumer.position([where])[0].offset
            if here != OFFSET_INVALID and here >= end:
                return
            if time.monotonic() - heard > SILENCE_SECONDS:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{topic}-{partition} is silent at {position}"))
            continue
        heard = time.monotonic()
        times = _times(messages)
        # A message that stands for an error has no timestamp, and few records lack a timestamp. So the reader looks for
        # errors only if a timestamp is missing.
        ended = False
        if not times[:, 0].all():
            errors = [error for error in map(_error, messages) if error is not None]
            fatal = next((error for error in errors if error.code() != KafkaError._PARTITION_EOF), None)
            if fatal is not None:
                raise KafkaException(fatal)
            if errors:
                ended = True
                messages = [message for message in messages if message.error() is None]
                times = _times(messages)
        if messages:
            position = offset_of(messages[-1]) + 1
            if position > end:
                messages = [message for message in messages if offset_of(message) < end]
                times = times[: len(messages)]
            if messages:
                yield messages, times
        if ended:
            return


def _times(messages: list[Message]) -> Integers:
    """Return for each message the type of its timestamp, and the timestamp."""
    count = len(messages)
    return np.fromiter(chain.from_iterable(map(_timestamp, messages)), np.int64, 2 * count).reshape(count, 2)


def chunk_of(messages: list[Message], times: Integers) -> Chunk:
    count = len(messages)
    offsets = np.fromiter(map(_offset, messages), np.int64, count)
    headers = list(map(_headers, messages))
    sums = [
        times[:, 1] % TIME_MODULUS * 4 + times[:, 0],
        bytes_sums(list(map(_key, messages))),
        bytes_sums(list(map(_value, messages))),
        np.fromiter(map(headers_sum, headers), np.int64, count) if any(headers) else np.full(count, NULL_SUM),
    ]
    return Chunk(offsets, sums)


def bytes_sums(values: list[bytes | None]) -> Integers:
    try:
        return np.fromiter(map(crc32, cast("list[bytes]", values)), np.int64, len(values))
    except TypeError:  # one of the values is null
        return np.fromiter(map(bytes_sum, values), np.int64, len(values))


def _add(sums: dict[int, list[int]], chunk: Chunk) -> None:
    """Add a chunk to the sums per block: count, then the columns."""
    blocks = chunk.offsets // BLOCK
    places = chunk.offsets % BLOCK + 1
    starts = np.flatnonzero(np.diff(blocks, prepend=-1))
    counts = np.diff(starts, append=len(blocks))
    weighted = [np.add.reduceat(column * places, starts) for column in chunk.sums]
    for index, block in enumerate(blocks[starts].tolist()):
        found = sums.setdefault(block, [0] * (1 + len(COLUMNS)))
        found[0] += int(counts[index])
        for column, values in enumerate(weighted, 1):
            found[column] += int(values[index])
