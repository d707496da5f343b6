"""A key in its topic: found, deleted by tombstones, and compacted away.

The one idea: Kafka has no request for compaction, but a topic's own settings decide when it is due. The job makes it
due at once, writes a tombstone to each partition that holds the key, and reads until the key's values are gone. A
broker never compacts the segment that it writes to. A write closes a segment whose time has passed, so the job writes
another tombstone each time it finds that the values are still there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from pyspark.sql import SparkSession

from pipeline.archive.plan import Range
from pipeline.archive.transforms import within
from pipeline.erase.proof import sha256_of
from pipeline.errors import PipelineError
from pipeline.kafka import Cluster, Partition, offset_of
from pipeline.progress import Progress as Lines
from pipeline.progress import Stop
from pipeline.verify.compare import pieces, work_frame
from pipeline.verify.sums import RECORD_SUMS
from pipeline.verify.topic import TopicReader

DUE_AT_ONCE = {
    "min.cleanable.dirty.ratio": "0.0",
    "min.compaction.lag.ms": "0",
    "max.compaction.lag.ms": "1",
    "segment.ms": "1000",
}
FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 2.0, 30.0
DELIVERY_SECONDS = 60


@dataclass(frozen=True, slots=True, order=True)
class Held:
    """A record of the key in the topic."""

    partition: int
    offset: int
    tombstone: bool


_HELD = pa.schema([("partition", pa.int32()), ("offset", pa.int64()), ("tombstone", pa.int32())])
_HELD_DDL = "partition int, offset long, tombstone int"


@dataclass(frozen=True, slots=True)
class KeyReader:
    """Reads ranges of offsets in Spark's workers, and returns the records of one key. It uses librdkafka, because
    Spark's connector fails if any record of the topic has a timestamp that does not fit a Spark timestamp.
    """

    reader: TopicReader
    key_sha256: str

    def held(self, pieces: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _, partition, read in self.reader.read(pieces):
            for messages, _ in read:
                found = [each for each in messages if self._has_key(each)]
                columns = [[partition] * len(found), [offset_of(each) for each in found],
                           [int(each.value() is None) for each in found]]  # fmt: skip
                yield pa.record_batch(columns, schema=_HELD)

    def _has_key(self, message: Message) -> bool:
        key = message.key()
        return key is not None and sha256_of(key) == self.key_sha256


def still_held(
    spark: SparkSession, cluster: Cluster, ranges: Sequence[Range], topic_ids: Mapping[str, str]
) -> list[Range]:
    """Return those of `ranges`, which have one offset each, whose record their topic still has."""
    logs = {
        (log.topic, log.partition): range(log.start, log.end)
        for log in cluster.logs(sorted({each.topic for each in ranges}), read_committed=False)
        if log.topic_id == topic_ids[log.topic]
    }
    offsets: dict[Partition, list[int]] = {}
    for each in ranges:
        if each.start in logs.get((each.topic, each.partition), ()):
            offsets.setdefault((each.topic, each.partition), []).append(each.start)
    if not offsets:
        return []
    work = pieces(Range(*key, min(some), max(some) + 1) for key, some in sorted(offsets.items()))
    reader = TopicReader(cluster.settings, read_committed=False)
    records = within(work_frame(spark, work).mapInArrow(reader.records, RECORD_SUMS), ranges)
    held = {(row.topic, row.partition, row.offset) for row in records.select("topic", "partition", "offset").collect()}
    return [each for each in ranges if (each.topic, each.partition, each.start) in held]


@dataclass(frozen=True, slots=True)
class TopicOfKey:
    """One topic, and one key by its SHA-256."""

    spark: SparkSession
    cluster: Cluster
    topic: str
    topic_id: str
    key_sha256: str

    def is_gone(self) -> bool:
        """Return whether the topic was deleted, or deleted and recreated."""
        return all(log.topic_id != self.topic_id for log in self.cluster.logs([self.topic], read_committed=False))

    def find(self, partitions: Sequence[int] | None = None) -> list[Held]:
        """Return the key's records in some partitions or in all, including those of aborted transactions."""
        logs = self.cluster.logs([self.topic], read_committed=False)
        ranges = [
            Range(log.topic, log.partition, log.start, log.end)
            for log in logs
            if log.end > log.start and (partitions is None or log.partition in partitions)
        ]
        if not ranges:
            return []
        reader = KeyReader(TopicReader(self.cluster.settings, read_committed=False), self.key_sha256)
        rows = work_frame(self.spark, pieces(ranges)).mapInArrow(reader.held, _HELD_DDL)
        return sorted(Held(row.partition, row.offset, bool(row.tombstone)) for row in rows.collect())

    def compact(self, key: bytes, found: Sequence[Held], seconds: float, lines: Lines, stop: Stop) -> list[Held]:
        """Write tombstones and wait until the topic holds no value of the key. Return the tombstones that the topic
        then has, also those in partitions that held no value.

        Raise PipelineError if the values are still there after `seconds`.
        """
        whole = sorted({each.partition for each in found})
        partitions = sorted({each.partition for each in found if not each.tombstone})
        deadline, pause = time.monotonic() + seconds, FIRST_LOOK_SECONDS
        while True:
            self._write(key, partitions)
            lines.say(f"wrote a tombstone to {len(partitions)} partitions, waits for compaction", event="tombstone")
            stopped = stop.wait(min(pause, max(0.0, deadline - time.monotonic())))
            held = self.find(partitions)
            partitions = sorted({each.partition for each in held if not each.tombstone})
            if not partitions:
                return self.find(whole)
            if stopped or time.monotonic() >= deadline:
                names = ", ".join(f"{self.topic}-{partition}" for partition in partitions)
                raise PipelineError(
                    f"{names} still holds values of the key, {seconds:g} s after its tombstone. The archive is "
                    "unchanged.",
                    "Start the same command again: it goes on. Brokers look for work every log.cleaner.backoff.ms, and "
                    "compact nothing if log.cleaner.enable is false; --wait-seconds waits longer.",
                )
            pause = min(2 * pause, LONGEST_LOOK_SECONDS)

    def _write(self, key: bytes, partitions: Sequence[int]) -> None:
        failed: list[KafkaError] = []

        def delivered(error: KafkaError | None, _message: Message) -> None:
            if error is not None:
                failed.append(error)

        producer = Producer(
            {**self.cluster.settings, "enable.idempotence": "true", "delivery.timeout.ms": DELIVERY_SECONDS * 1000}
        )
        for partition in partitions:
            producer.produce(self.topic, None, key, partition, on_delivery=delivered)
        left = producer.flush(2 * DELIVERY_SECONDS)
        if failed or left:
            raise KafkaException(failed[0] if failed else KafkaError(KafkaError._TIMED_OUT))
