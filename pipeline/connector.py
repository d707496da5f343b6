"""Spark's Kafka connector, asked for exactly the ranges that were planned."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from pyspark.sql import DataFrame, SparkSession

# Kafka's defaults are for many small fetches; a batch wants few large ones. At most one such answer per task is held.
_FETCH = {
    "max.partition.fetch.bytes": str(4 * 1024 * 1024),
    "max.poll.records": "5000",
    "receive.buffer.bytes": str(1024 * 1024),
}


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
    """The records of `ranges` with their headers; at most one range per partition.

    An error, not fewer rows, if the topic has lost some of them. Ranges are cut so that every core has one.
    """
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
