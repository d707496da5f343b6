"""Find differences between an archive and its topic: pure functions of two frames of sums, and of ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from pipeline.archive.plan import Progress, Range, without
from pipeline.kafka import Log, Partition
from pipeline.verify.differing import SUMS, unequal_groups, unequal_records
from pipeline.verify.sums import BLOCK

PIECE_BLOCKS = 256
TASKS_PER_CORE, TASK_RECORDS, TASK_PIECES = 8, 100_000, 4


@dataclass(frozen=True, slots=True)
class Scope:
    """The ranges of a partition that can be proved (`ranges`), and remarks on why the others cannot."""

    topic: str
    partition: int
    ranges: tuple[Range, ...]
    remarks: tuple[str, ...]

    @property
    def records(self) -> int:
        return sum(each.records for each in self.ranges)


def scopes(progress: Progress, logs: Sequence[Log]) -> list[Scope]:
    """Return, for each partition, the offsets that the archive claims and the topic still holds."""
    held = {(log.topic, log.partition): log for log in logs}
    found: list[Scope] = []
    for key, end in sorted(progress.next.items()):
        topic, partition = key
        claimed = list(without(Range(topic, partition, progress.first[key], end), (*progress.lost, *progress.left_out)))
        remarks = [
            f"{each} were removed from the topic before they were archived"
            for each in progress.lost
            if (each.topic, each.partition) == key
        ]
        remarks += [
            f"{each}: the timestamp does not fit the table, so the record is in the dead letters only"
            for each in progress.skipped
            if (each.topic, each.partition) == key
        ]
        remarks += [
            f"{each}: the tombstone of an erased key, which the archive leaves out"
            for each in progress.erased
            if (each.topic, each.partition) == key
        ]
        log = held.get(key)
        if log is not None and log.topic_id != progress.topic_ids[topic]:
            remarks.append("its topic was deleted and created again, so nothing of it can be proved")
            claimed = []
        elif log is None:
            remarks.append("its topic was deleted, so nothing of it can be proved")
            claimed = []
        elif log.start > progress.first[key]:
            kept = [Range(topic, partition, max(each.start, log.start), each.end) for each in claimed]
            claimed = [each for each in kept if each.end > each.start]
            remarks.append(f"offsets before {log.start:,} have been removed from the topic, so they cannot be proved")
        found.append(Scope(topic, partition, tuple(claimed), tuple(remarks)))
    return found


def pieces(ranges: Iterable[Range]) -> list[Range]:
    """Cut ranges at the borders of blocks. So a block is in two pieces only if a range ends inside it."""
    size = PIECE_BLOCKS * BLOCK
    found: list[Range] = []
    for each in ranges:
        start = each.start
        while start < each.end:
            end = min((start // size + 1) * size, each.end)
            found.append(Range(each.topic, each.partition, start, end))
            start = end
    return found


def tasks(pieces: int, records: int, cores: int) -> int:
    """Return the number of tasks that should read this many pieces.

    There is a task per piece, so that no core waits long for the last one. If there are many pieces, several share a
    task, because each task creates a consumer.
    """
    enough = max(TASKS_PER_CORE * cores, min(pieces // TASK_PIECES, records // TASK_RECORDS))
    return max(1, min(pieces, enough))


def work_frame(spark: SparkSession, work: Sequence[Range]) -> DataFrame:
    """Return a row per piece, distributed over tasks: topic, partition, start, end."""
    rows = [(each.topic, each.partition, each.start, each.end) for each in work]
    count = tasks(len(rows), sum(each.records for each in work), spark.sparkContext.defaultParallelism)
    spread = spark.sparkContext.parallelize(rows, count)
    return spark.createDataFrame(spread, "topic string, partition int, start long, end long")


def rounds(work: Sequence[Range], offsets: int) -> Iterator[list[Range]]:
    """Yield `work` in its order, in lists of at least `offsets` offsets each. The last list may have fewer."""
    some: list[Range] = []
    left = offsets
    for each in work:
        some.append(each)
        left -= each.records
        if left <= 0:
            yield some
            some, left = [], offsets
    if some:
        yield some


def unequal_blocks(archive: DataFrame, topic: DataFrame) -> DataFrame:
    """Return the blocks that differ: topic, partition, block. In `topic`, several rows may hold parts of the same
    block's sums.
    """
    keys = ("topic", "partition", "block")
    whole = topic.groupBy(*keys).agg(*(F.sum(name).alias(name) for name in ("records", *SUMS)))
    return unequal_groups(archive, whole, keys)


def unequal_offsets(archive: DataFrame, topic: DataFrame, *, compacted: bool = False) -> DataFrame:
    """Return the records that differ: topic, partition, offset, and `what` in words. In a compacted topic, records that
    the archive has may be missing.
    """
    return unequal_records(
        topic, archive, ("topic", "partition", "offset"), source_name="the topic", copy_name="the archive",
        source_may_lack=compacted,
    )  # fmt: skip


def unequal_ranges(records: DataFrame) -> DataFrame:
    """Merge differing records into ranges of consecutive offsets: topic, partition, what, first, last, records.

    `records` is what `unequal_offsets` returns. A lost file is then one range instead of thousands of offsets.
    """
    alike = Window.partitionBy("topic", "partition", "what").orderBy("offset")
    return (
        records.withColumn("_run", F.col("offset") - F.row_number().over(alike))
        .groupBy("topic", "partition", "what", "_run")
        .agg(F.min("offset").alias("first"), F.max("offset").alias("last"), F.count(F.lit(1)).alias("records"))
        .drop("_run")
    )


def unclaimed(archive: DataFrame, progress: Progress) -> DataFrame:
    """Count the archive's records outside the range that it claims, by topic and partition."""
    claims = claims_frame(archive, progress.first, progress.next)
    inside = (F.col("offset") >= F.col("first")) & (F.col("offset") < F.col("next"))
    return (
        archive.select("topic", "partition", "offset")
        .join(F.broadcast(claims), ["topic", "partition"], "left")
        .where(F.col("first").isNull() | ~inside)
        .groupBy("topic", "partition")
        .count()
    )


def claims_frame(like: DataFrame, first: Mapping[Partition, int], following: Mapping[Partition, int]) -> DataFrame:
    rows = [(topic, partition, first[topic, partition], end) for (topic, partition), end in following.items()]
    return like.sparkSession.createDataFrame(rows, "topic string, partition int, first long, next long")
