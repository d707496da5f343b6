"""Find differences between an archive and its topic: pure functions of two frames of sums, and of ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from pipeline.archive.plan import Progress, Range, without
from pipeline.kafka import Log, Partition
from pipeline.verify.sums import BLOCK, COLUMNS

PIECE_BLOCKS = 256
TASKS_PER_CORE, TASK_RECORDS, TASK_PIECES = 8, 100_000, 4


@dataclass(frozen=True, slots=True)
class Scope:
    """The provable `ranges` of a partition, and remarks on why the rest cannot be proved."""

    topic: str
    partition: int
    ranges: tuple[Range, ...]
    remarks: tuple[str, ...]

    @property
    def records(self) -> int:
        return sum(each.records for each in self.ranges)


def scopes(progress: Progress, logs: Sequence[Log]) -> list[Scope]:
    """Per partition: what the archive claims and the topic still holds."""
    held = {(log.topic, log.partition): log for log in logs}
    found: list[Scope] = []
    for key, end in sorted(progress.next.items()):
        topic, partition = key
        claimed = list(without(Range(topic, partition, progress.first[key], end), (*progress.lost, *progress.left_out)))
        remarks = [
            f"{each} had gone before they were archived"
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
            remarks.append("its topic has gone, so nothing of it can be proved")
            claimed = []
        elif log.start > progress.first[key]:
            kept = [Range(topic, partition, max(each.start, log.start), each.end) for each in claimed]
            claimed = [each for each in kept if each.end > each.start]
            remarks.append(f"offsets before {log.start:,} have been removed from the topic, so they cannot be proved")
        found.append(Scope(topic, partition, tuple(claimed), tuple(remarks)))
    return found


def pieces(ranges: Iterable[Range]) -> list[Range]:
    """Ranges cut at borders of blocks, so that no block is in two pieces unless a range ends inside it."""
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
    """Return the number of tasks that read so many pieces.

    A task per piece, so that no core waits long for the last. If there are many, several share a task, because each
    task makes a consumer of its own.
    """
    enough = max(TASKS_PER_CORE * cores, min(pieces // TASK_PIECES, records // TASK_RECORDS))
    return max(1, min(pieces, enough))


def work_frame(spark: SparkSession, work: Sequence[Range]) -> DataFrame:
    """Return a row per piece, spread over tasks: topic, partition, start, end."""
    rows = [(each.topic, each.partition, each.start, each.end) for each in work]
    count = tasks(len(rows), sum(each.records for each in work), spark.sparkContext.defaultParallelism)
    spread = spark.sparkContext.parallelize(rows, count)
    return spark.createDataFrame(spread, "topic string, partition int, start long, end long")


def rounds(work: Sequence[Range], offsets: int) -> Iterator[list[Range]]:
    """`work` in its order, in lists of at least so many offsets, but for the last."""
    some: list[Range] = []
    for each in work:
        some.append(each)
        if sum(part.records for part in some) >= offsets:
            yield some
            some = []
    if some:
        yield some


def unequal_blocks(archive: DataFrame, topic: DataFrame) -> DataFrame:
    """Blocks whose sums are not the same on both sides, or that only one side has: topic, partition, block."""
    keys = ["topic", "partition", "block"]
    summed = topic.groupBy(*keys).agg(
        F.sum("records").alias("records"), *(F.sum(f"{name}_sum").alias(f"{name}_sum") for name in COLUMNS)
    )
    left, right = archive.alias("a"), summed.alias("t")
    names = ["records", *(f"{name}_sum" for name in COLUMNS)]
    on = [F.col(f"a.{key}").eqNullSafe(F.col(f"t.{key}")) for key in keys]
    differs = F.lit(False)
    for name in names:
        differs = differs | ~F.col(f"a.{name}").eqNullSafe(F.col(f"t.{name}"))
    joined = left.join(right, on[0] & on[1] & on[2], "full_outer").where(differs)
    return joined.select(*(F.coalesce(f"a.{key}", f"t.{key}").alias(key) for key in keys))


def unequal_records(archive: DataFrame, topic: DataFrame, *, compacted: bool = False) -> DataFrame:
    """Records that differ, with `what` in words. A compacted topic may have removed what the archive holds."""
    keys = ["topic", "partition", "offset"]
    counted = archive.groupBy(*keys).agg(
        F.count(F.lit(1)).alias("copies"), *(F.first(f"{name}_sum").alias(f"{name}_sum") for name in COLUMNS)
    )
    joined = counted.alias("a").join(
        topic.withColumn("there", F.lit(True)).alias("t"), keys, "right_outer" if compacted else "full_outer"
    )
    what = F.when(F.col("there").isNull(), "the topic does not hold it, the archive does")
    what = what.when(F.col("copies").isNull(), "the archive does not hold it, the topic does")
    for name in COLUMNS:
        unlike = ~F.col(f"a.{name}_sum").eqNullSafe(F.col(f"t.{name}_sum"))
        what = what.when(unlike, f"its {name} is another in the archive than in the topic")
    what = what.when(F.col("copies") > 1, "the archive holds it more than once")
    return joined.withColumn("what", what).where("what IS NOT NULL").select(*keys, "what")


def unequal_ranges(records: DataFrame) -> DataFrame:
    """Merge differing records into ranges of consecutive offsets: topic, partition, what, first, last, records.

    `records` is what `unequal_records` returns. A lost file is then one range instead of thousands of offsets.
    """
    alike = Window.partitionBy("topic", "partition", "what").orderBy("offset")
    return (
        records.withColumn("_run", F.col("offset") - F.row_number().over(alike))
        .groupBy("topic", "partition", "what", "_run")
        .agg(F.min("offset").alias("first"), F.max("offset").alias("last"), F.count(F.lit(1)).alias("records"))
        .drop("_run")
    )


def unclaimed(archive: DataFrame, progress: Progress) -> DataFrame:
    """How many records the archive holds that its progress does not speak of, by topic and partition."""
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
