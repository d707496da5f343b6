"""Write the records of a batch into target partitions, each exactly once however often the batch is tried.

The one idea: the sequence of records of a target partition is known, and this task is the partition's only writer. So
the end of the partition shows how many records of the sequence it holds. The last of them names its source in a header,
which is checked. An idempotent producer, which keeps order and leaves no gap, writes the rest. Afterwards the partition
must end where the sequence does; otherwise another client has written to it, which is an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition
from pyspark import TaskContext

from pipeline.kafka import Partition
from pipeline.replay.plan import MARK

REQUEST_SECONDS = 30.0
FLUSH_SECONDS = 120.0
SETTLE_SECONDS = 1.0
QUEUED_MESSAGES = 50_000
MAX_UNFINISHED, MAX_UNFINISHED_RUNS = 64, 50_000
"""Number of target partitions, and of rows of their map, that wait for the broker together. If they waited one by one,
a thousand partitions of few records would spend most of their time waiting.
"""

MAP_OUT = pa.schema(
    [
        ("replay", pa.string()),
        ("batch", pa.int64()),
        ("source_topic", pa.string()),
        ("source_partition", pa.int32()),
        ("source_from", pa.int64()),
        ("target_topic", pa.string()),
        ("target_partition", pa.int32()),
        ("target_from", pa.int64()),
        ("records", pa.int64()),
    ]
)


class ForeignWriterError(Exception):
    """Another producer has written to a target partition."""


@dataclass(frozen=True, slots=True)
class Writer:
    """The writer of a batch, which runs in Spark's workers. `bases` are the ends of the target partitions when this
    batch began.
    """

    name: str
    batch: int
    settings: Mapping[str, str]
    bases: Mapping[Partition, int]
    keep_timestamps: bool
    settle: bool
    """True if the writer must first wait until a partition's end no longer moves. A killed writer may still have
    requests in flight.
    """
    records_per_second: float | None = None
    at_once: int = MAX_UNFINISHED
    """Number of target partitions that wait for the broker together."""

    def write(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write ordered records, and yield rows of the offset map."""
        settle = self.settle or _is_retry()
        with_open = _Run(self)
        try:
            unfinished: list[_Target] = []
            for batch in batches:
                for part in _by_target(batch):
                    key = (part["target_topic"][0].as_py(), part["target_partition"][0].as_py())
                    if not unfinished or unfinished[-1].key != key:
                        runs = sum(len(each.runs) for each in unfinished)
                        if len(unfinished) == self.at_once or runs > MAX_UNFINISHED_RUNS:
                            yield with_open.finish(unfinished)
                            unfinished = []
                        unfinished.append(with_open.begin(key, settle=settle))
                    with_open.write(unfinished[-1], part)
            yield with_open.finish(unfinished)
        finally:
            with_open.close()


@dataclass(slots=True)
class _Target:
    key: Partition
    base: int
    there: int
    """Number of this batch's records that the partition already has."""
    last_is_visible: bool
    last_mark: bytes | None
    seen: int = 0
    runs: list[tuple[str, int, int, int, int]] = field(default_factory=list[tuple[str, int, int, int, int]])
    """Rows of the offset map: source topic, partition and offset, target offset, count."""


class _Run:
    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._parent = os.getppid()
        self._failed: list[str] = []
        self._started, self._sent = time.monotonic(), 0
        self._producer = Producer(
            {
                **writer.settings,
                "enable.idempotence": "true",
                "enable.gapless.guarantee": "true",
                "linger.ms": "20",
                "batch.num.messages": "10000",
                "batch.size": "1000000",
                "compression.type": "zstd",
                "queue.buffering.max.messages": str(QUEUED_MESSAGES),
                "message.timeout.ms": str(int(FLUSH_SECONDS * 1000)),
                "delivery.report.only.error": True,
                "on_delivery": self._delivered,
            }
        )
        self._consumer = Consumer({**writer.settings, "group.id": "sluice-replay", "enable.auto.commit": "false"})

    def begin(self, key: Partition, *, settle: bool) -> _Target:
        end, base = self._end(key), self._writer.bases[key]
        # Records of this batch may be of a writer that still runs. If Spark runs a whole stage again, it does not end
        # the tasks of the first run, and the new tasks are no retries.
        if settle or end > base:
            end = self._settled(key, end)
        if end < base:
            raise ForeignWriterError(f"{key[0]}-{key[1]} ends at {end}, before {base}, where the batch began")
        # Records that the target's retention has removed cannot be read, but they still count.
        visible = base < end and end - 1 >= self._watermarks(key)[0]
        return _Target(key, base, end - base, visible, self._mark_at(key, end - 1) if visible else None)

    def write(self, target: _Target, part: pa.RecordBatch) -> None:
        """Produce those records of `part` that the partition does not have yet. Add all runs of `part` to the map's
        rows.
        """
        topics, partitions = part["topic"].to_pylist(), part["partition"].to_pylist()
        offsets, times = part["offset"].to_pylist(), part["timestamp_ms"].to_pylist()
        self._note(target, topics, partitions, part["offset"].to_numpy())
        skip = max(0, min(len(offsets), target.there - target.seen))
        if skip and target.seen + skip == target.there and target.last_is_visible:
            last = skip - 1
            expected = mark(topics[last], partitions[last], offsets[last], times[last])
            if target.last_mark != expected:
                raise ForeignWriterError(
                    f"{target.key[0]}-{target.key[1]} offset {target.base + target.there - 1} is "
                    f"{_shown(target.last_mark)} instead of {_shown(expected)}"
                )
        target.seen += len(offsets)
        if skip == len(offsets):
            return
        topic, partition = target.key
        keys, values = part["key"].to_pylist(), part["value"].to_pylist()
        headers = part["headers"].to_pylist() if len(part["headers"].flatten()) else None
        produce, keep = self._producer.produce, self._writer.keep_timestamps
        for index in range(skip, len(offsets)):
            at = times[index]
            marks: list[tuple[str, Any]] = [(MARK, mark(topics[index], partitions[index], offsets[index], at))]
            if headers is not None:
                marks = [*((each["key"], each["value"]) for each in headers[index]), *marks]
            # librdkafka replaces a timestamp of 0 by the current time. Earlier timestamps are treated in the same way.
            timestamp = at if keep and at > 0 else 0
            while True:
                try:
                    produce(topic, values[index], keys[index], partition, timestamp=timestamp, headers=marks)
                    break
                except BufferError:
                    self._check()
                    self._producer.poll(0.1)
        self._producer.poll(0)
        self._check()
        self._slow_down(len(offsets) - skip)

    def finish(self, targets: list[_Target]) -> pa.RecordBatch:
        """Wait until all records are stored. Return rows of the offset map. Raise an error if a partition has a wrong
        end.
        """
        deadline = time.monotonic() + FLUSH_SECONDS
        while self._producer.flush(1.0):
            self._check()
            if time.monotonic() > deadline:
                named = ", ".join(f"{topic}-{partition}" for topic, partition in (each.key for each in targets[:3]))
                raise KafkaException(f"{named}, …: not stored within {FLUSH_SECONDS:.0f} s")
        self._check()
        for target in targets:
            self._check_end(target)
        rows = [
            (self._writer.name, self._writer.batch, topic, partition, start, *target.key, at, count)
            for target in targets
            for topic, partition, start, at, count in target.runs
        ]
        columns = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in MAP_OUT.names]
        return pa.record_batch(columns, schema=MAP_OUT)

    def _check_end(self, target: _Target) -> None:
        if target.there > target.seen:
            raise ForeignWriterError(
                f"{target.key[0]}-{target.key[1]} holds {target.there - target.seen} records more than were replayed"
            )
        end, expected = self._end(target.key), target.base + target.seen
        if end != expected:
            raise ForeignWriterError(f"{target.key[0]}-{target.key[1]} ends at {end} instead of {expected}")

    def close(self) -> None:
        # Records that are not flushed yet belong to a failed attempt. The next attempt writes them again, so they must
        # not arrive later.
        self._producer.purge(in_queue=True, in_flight=False, blocking=True)
        self._consumer.close()

    def _note(self, target: _Target, topics: list[str], partitions: list[int], offsets: Any) -> None:
        names = np.array(topics, object)
        breaks = (np.diff(offsets) != 1) | (np.diff(np.array(partitions)) != 0) | (names[1:] != names[:-1])
        starts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
        for start, stop in zip(starts, [*starts[1:], len(topics)], strict=True):
            run = (
                topics[start],
                partitions[start],
                int(offsets[start]),
                target.base + target.seen + start,
                stop - start,
            )
            if target.runs:
                topic, partition, source, at, count = target.runs[-1]
                if (topic, partition, source + count, at + count) == run[:4]:
                    target.runs[-1] = (topic, partition, source, at, count + run[4])
                    continue
            target.runs.append(run)

    def _delivered(self, error: object, message: Message) -> None:
        self._failed.append(f"{message.topic()}-{message.partition()}: {error}")

    def _check(self) -> None:
        if os.getppid() != self._parent:
            # The executor has ended, and Spark runs this task again on another executor.
            os._exit(1)
        if self._failed:
            raise KafkaException(self._failed[0])

    def _slow_down(self, records: int) -> None:
        self._sent += records
        if self._writer.records_per_second:
            due = self._started + self._sent / self._writer.records_per_second
            while (left := due - time.monotonic()) > 0:
                self._producer.poll(min(left, 0.5))
                self._check()

    def _end(self, key: Partition) -> int:
        return self._watermarks(key)[1]

    def _watermarks(self, key: Partition) -> tuple[int, int]:
        return self._consumer.get_watermark_offsets(TopicPartition(*key), REQUEST_SECONDS, cached=False)

    def _settled(self, key: Partition, end: int) -> int:
        """Return the end of the partition after it has stopped moving. Requests of a killed writer may still arrive."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.1)
            again = self._end(key)
            # The end would move for ever if another client wrote all the time.
            if again > end and self._mark_at(key, again - 1) is None:
                raise ForeignWriterError(f"{key[0]}-{key[1]} offset {again - 1} is {_shown(None)}")
            if again != end:
                end, deadline = again, time.monotonic() + SETTLE_SECONDS
        return end

    def _mark_at(self, key: Partition, offset: int) -> bytes | None:
        """Return the mark of the record at `offset`, None if the record has none."""
        self._consumer.assign([TopicPartition(*key, offset)])
        deadline = time.monotonic() + REQUEST_SECONDS
        while time.monotonic() < deadline:
            message = self._consumer.poll(1.0)
            if message is None:
                continue
            if message.error() is not None:
                raise KafkaException(message.error())
            if message.offset() != offset:
                return None
            marks = [value for name, value in message.headers() or () if name == MARK and isinstance(value, bytes)]
            return marks[-1] if marks else None
        raise KafkaException(f"{key[0]}-{key[1]} offset {offset} cannot be read within {REQUEST_SECONDS:.0f} s")


def mark(topic: str, partition: int, offset: int, timestamp_ms: int) -> bytes:
    """Return the header value that names a record's source."""
    return b"%s/%d/%d/%d" % (topic.encode(), partition, offset, timestamp_ms)


def _by_target(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the parts of a batch. Each part has one target partition."""
    if not batch.num_rows:
        return
    topics, partitions = batch["target_topic"].to_numpy(zero_copy_only=False), batch["target_partition"].to_numpy()
    breaks = (np.flatnonzero((topics[1:] != topics[:-1]) | (partitions[1:] != partitions[:-1])) + 1).tolist()
    for start, stop in zip([0, *breaks], [*breaks, batch.num_rows], strict=True):
        yield batch.slice(start, stop - start)


def _is_retry() -> bool:
    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


def _shown(mark: bytes | None) -> str:
    return "a record of another client" if mark is None else mark.decode(errors="replace")
