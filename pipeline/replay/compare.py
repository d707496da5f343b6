"""Compare the records that a replay wrote with its archive: time, key, value and headers of every record.

The one idea: a replayed record names its source in a header, its mark. For each target partition, both sides sum the
CRC-32 of each part of a record times a weight, which follows from the mark. So a changed, lost, doubled or foreign
record changes the sums. `verify/differing.py` compares the records of the partitions whose sums differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import pyarrow as pa
from confluent_kafka import Message
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.replay.plan import MARK
from pipeline.verify.differing import SUMS, unequal_groups, unequal_records
from pipeline.verify.sums import crc_column, headers_column, headers_sum
from pipeline.verify.topic import Integers, TopicReader, bytes_sums

KEYS = ("target_topic", "target_partition")
# The sum over any number of records fits into 64 bits.
MODULUS, WEIGHTS = (1 << 31) - 1, 4093
OUT = pa.schema(
    [
        ("target_topic", pa.string()),
        ("target_partition", pa.int32()),
        ("mark", pa.string()),
        *((name, pa.int64()) for name in SUMS),
    ]
)
OUT_DDL = "target_topic string, target_partition int, mark string, " + ", ".join(f"{name} long" for name in SUMS)


def expected(targeted: DataFrame, *, keep_timestamps: bool) -> DataFrame:
    """Return `OUT` of the archive's records, each with its target."""
    milliseconds = F.unix_millis("timestamp")
    mark = F.concat_ws("/", "topic", F.col("partition"), F.col("offset"), milliseconds)
    # A timestamp of 1970 or earlier is replaced by the time of writing.
    time = F.when(milliseconds > 0, milliseconds).otherwise(0) if keep_timestamps else F.lit(0)
    return targeted.select(
        *KEYS,
        mark.alias("mark"),
        time.cast("long").alias("timestamp_sum"),
        crc_column(F.col("key")).alias("key_sum"),
        crc_column(F.col("value")).alias("value_sum"),
        crc_column(headers_column()).alias("headers_sum"),
    )


@dataclass(frozen=True, slots=True)
class MarkedReader:
    """Reads target partitions in Spark's workers: ranges of offsets in, `OUT` of their records out."""

    reader: TopicReader
    keep_timestamps: bool

    def records(self, pieces: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for topic, partition, read in self.reader.read(pieces):
            for messages, times in read:
                yield self._batch(topic, partition, messages, times)

    def _batch(self, topic: str, partition: int, messages: list[Message], times: Integers) -> pa.RecordBatch:
        marks: list[str] = []
        headers: list[int] = []
        milliseconds = times[:, 1].copy() if self.keep_timestamps else times[:, 1] * 0
        for index, message in enumerate(messages):
            own = cast("list[tuple[str, bytes | None]]", message.headers() or [])
            name, content = own[-1] if own else ("", None)
            mark = content.decode(errors="replace") if name == MARK and content is not None else ""
            marks.append(mark)
            headers.append(headers_sum(own[:-1] if mark else own))
            source = mark.rpartition("/")[2]
            if source == "0" or source.startswith("-"):
                milliseconds[index] = 0
        keys, values = [each.key() for each in messages], [each.value() for each in messages]
        count = len(messages)
        columns = [pa.array(each) for each in (milliseconds, bytes_sums(keys), bytes_sums(values), headers)]
        named = [pa.array([topic] * count), pa.array([partition] * count, pa.int32()), pa.array(marks)]
        return pa.record_batch([*named, *columns], schema=OUT)


def totals(records: DataFrame) -> DataFrame:
    """Return, for each target partition, the number of its records and their sums."""
    weight = F.crc32(F.col("mark").cast("binary")) % WEIGHTS + 1
    # A timestamp has up to 54 bits, so the remainder must be taken before the product with the weight.
    weighted = {name: F.pmod(F.pmod(name, F.lit(MODULUS)) * weight, F.lit(MODULUS)) for name in SUMS}
    sums = [F.sum(column).alias(name) for name, column in weighted.items()]
    return records.groupBy(*KEYS).agg(F.count(F.lit(1)).alias("records"), *sums)


def unequal_partitions(archive: DataFrame, targets: DataFrame) -> DataFrame:
    """Return the target partitions whose totals differ."""
    return unequal_groups(archive, targets, KEYS)


def unequal_marks(archive: DataFrame, targets: DataFrame) -> DataFrame:
    """Return the records that differ: target partition, mark, and `what` in words."""
    return unequal_records(archive, targets, (*KEYS, "mark"), source_name="the archive", copy_name="the target")
