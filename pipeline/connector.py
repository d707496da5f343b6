"""Read exactly the planned ranges of offsets with Spark's Kafka connector."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession

# Kafka's defaults suit many small fetches, but a batch needs few large ones. A task holds at most one such answer in
# memory.
_FETCH = {
    "max.partition.fetch.bytes": str(4 * 1024 * 1024),
    "max.poll.records": "5000",
    "receive.buffer.bytes": str(1024 * 1024),
}


SMALL_RECORDS = 5_000
MANY_PER_CORE = 4


class OffsetRange(Protocol):
    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


def read(
    spark: SparkSession,
    bootstrap: str,
    ranges: Sequence[OffsetRange],
    *,
    settings: Mapping[str, str],
    read_committed: bool = True,
) -> DataFrame:
    """Return the records of `ranges` with their headers.

    The frame raises an error if the topic has lost some of them. Ranges are split so that every core gets one. Many
    small ranges share one task per core, because a task and a file for each range would cost more than reading its
    records.
    """
    cores = spark.sparkContext.defaultParallelism
    small = [each for each in ranges if each.end - each.start <= SMALL_RECORDS]
    if len(small) <= MANY_PER_CORE * cores:
        return _read_all(spark, bootstrap, ranges, settings, read_committed)
    large = [each for each in ranges if each.end - each.start > SMALL_RECORDS]
    frames = [
        _read_all(spark, bootstrap, some, settings, read_committed)
        .coalesce(1)
        .sortWithinPartitions("topic", "partition", "offset")
        for some in shared(small, cores)
    ]
    return reduce(
        DataFrame.union, [*frames, *([_read_all(spark, bootstrap, large, settings, read_committed)] if large else [])]
    )


def shared(ranges: Sequence[OffsetRange], groups: int) -> list[list[OffsetRange]]:
    """Divide `ranges` into at most `groups` groups of about equally many records. A small topic stays in one group."""
    whole = sum(each.end - each.start for each in ranges)
    found: list[list[OffsetRange]] = [[]]
    records = 0
    for each in sorted(ranges, key=lambda part: (part.topic, part.partition, part.start)):
        full = records * groups >= whole * len(found)
        another = not found[-1] or found[-1][-1].topic != each.topic or len(found[-1]) > len(ranges) // groups
        if full and another and found[-1]:
            found.append([])
        found[-1].append(each)
        records += each.end - each.start
    return found


def _read_all(
    spark: SparkSession,
    bootstrap: str,
    ranges: Sequence[OffsetRange],
    settings: Mapping[str, str],
    read_committed: bool,
) -> DataFrame:
    # The connector takes one range per partition. So further ranges of a partition are read by further frames.
    rounds: list[list[OffsetRange]] = []
    seen: dict[tuple[str, int], int] = defaultdict(int)
    for each in ranges:
        number = seen[each.topic, each.partition]
        seen[each.topic, each.partition] += 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(each)
    frames = [_read(spark, bootstrap, some, settings, read_committed) for some in rounds]
    return reduce(DataFrame.union, frames)


def _read(
    spark: SparkSession,
    bootstrap: str,
    ranges: Sequence[OffsetRange],
    settings: Mapping[str, str],
    read_committed: bool,
) -> DataFrame:
    starting: dict[str, dict[str, int]] = defaultdict(dict)
    ending: dict[str, dict[str, int]] = defaultdict(dict)
    for each in ranges:
        starting[each.topic][str(each.partition)] = each.start
        ending[each.topic][str(each.partition)] = each.end
    assigned = {topic: sorted(int(partition) for partition in of_topic) for topic, of_topic in starting.items()}
    options = {
        "kafka.bootstrap.servers": bootstrap,
        "kafka.isolation.level": "read_committed" if read_committed else "read_uncommitted",
        "assign": json.dumps(assigned),
        "startingOffsets": json.dumps(starting),
        "endingOffsets": json.dumps(ending),
        "includeHeaders": "true",
        "failOnDataLoss": "true",
        **{f"kafka.{name}": value for name, value in _FETCH.items()},
        **{f"kafka.{name}": value for name, value in settings.items()},
    }
    cores = spark.sparkContext.defaultParallelism
    if len(ranges) < cores:
        options["minPartitions"] = str(cores)
    return spark.read.format("kafka").options(**options).load()
