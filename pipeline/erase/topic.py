"""A key in its topic: found, deleted by tombstones, and compacted away.

The one idea: Kafka has no request for compaction, but a topic's own settings decide when it is due. The job makes it
due at once, writes a tombstone to each partition that holds the key, and reads until the key's values are gone. A
broker never compacts the segment that it writes to. A write closes a segment whose time has passed, so the job writes
another tombstone each time it finds that the values are still there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pipeline import connector
from pipeline.archive.plan import Range
from pipeline.errors import PipelineError
from pipeline.kafka import Cluster
from pipeline.progress import Progress as Lines
from pipeline.progress import Stop

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


@dataclass(frozen=True, slots=True)
class TopicOfKey:
    """One topic, and one key by its SHA-256. `settings` are for Spark's Kafka client."""

    spark: SparkSession
    cluster: Cluster
    bootstrap: str
    settings: Mapping[str, str]
    topic: str
    topic_id: str
    key_sha256: str

    def is_gone(self) -> bool:
        """Return whether the topic was deleted, or deleted and recreated."""
        if self.topic not in self.cluster.existing():
            return True
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
        rows = connector.read(self.spark, self.bootstrap, ranges, settings=self.settings, read_committed=False)
        found = rows.where(F.sha2("key", 256) == self.key_sha256)
        return sorted(
            Held(row.partition, row.offset, row.tombstone)
            for row in found.select("partition", "offset", F.col("value").isNull().alias("tombstone")).collect()
        )

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
