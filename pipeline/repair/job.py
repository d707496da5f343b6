"""Archive given ranges of offsets again, as long as their topic still has them.

The one idea: a repair replaces whole days of a topic in one commit: rows outside the ranges come from the archive, and
rows inside from the topic. It replaces whole days, because a table can drop a day without reading it. So a missing or
damaged file is no obstacle. The archive's progress does not change.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Collection, Sequence
from itertools import pairwise

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from pipeline import catalog, connector, kafka, session, table
from pipeline.archive import typed, values
from pipeline.archive.job import last_progress
from pipeline.archive.plan import Progress, Range, without
from pipeline.archive.transforms import to_records, within
from pipeline.errors import LOST_FILE, PipelineError, explain
from pipeline.kafka import Cluster
from pipeline.progress import Progress as Lines
from pipeline.progress import Stop
from pipeline.schema import DATA, RECORD
from pipeline.ticker import Ticker

MAX_RANGES = 1_000
_RANGE = re.compile(r"(?P<topic>.+)-(?P<partition>\d+):(?P<first>\d+)(?:-(?P<last>\d+))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kafka.add_arguments(parser)
    parser.add_argument("--archive", required=True, metavar="TABLE", help="the table that `archive` wrote")
    parser.add_argument(
        "--ranges", required=True, metavar="TOPIC-PARTITION:FIRST-LAST,…",
        help="the offsets to archive again, as verify names them, e.g. orders-0:1200-1299,orders-3:7",
    )  # fmt: skip
    parser.add_argument("--isolation", choices=("read_committed", "read_uncommitted"), default="read_committed")
    catalog.add_arguments(parser)
    values.add_value_arguments(parser.add_argument_group("typed"))


def run(arguments: argparse.Namespace, lines: Lines, stop: Stop) -> int:
    ranges = parse_ranges(arguments.ranges)
    cluster = Cluster(arguments.bootstrap, kafka.settings_of(arguments.client_conf, "--client-conf"))
    cluster.existing()
    spark = session.open_session(session.options_of(arguments, "sluice repair"), lines)
    try:
        repair(spark, cluster, arguments, ranges, lines, stop)
    finally:
        spark.stop()
    return 0


def parse_ranges(text: str) -> list[Range]:
    """Return the ranges of --ranges. Raise PipelineError if the text has another form, or ranges overlap."""
    found: list[Range] = []
    for word in text.replace(" ", "").split(","):
        match = _RANGE.fullmatch(word)
        if match is None or int(match["last"] or match["first"]) < int(match["first"]):
            raise PipelineError(
                f"--ranges {word} is not TOPIC-PARTITION:FIRST-LAST.", "Write it like orders-0:1200-1299."
            )
        first = int(match["first"])
        found.append(Range(match["topic"], int(match["partition"]), first, int(match["last"] or first) + 1))
    if len(found) > MAX_RANGES:
        raise PipelineError(f"--ranges has {len(found):,} ranges.", f"Repair at most {MAX_RANGES:,} at once.")
    found.sort()
    for before, after in pairwise(found):
        if (before.topic, before.partition) == (after.topic, after.partition) and before.end > after.start:
            raise PipelineError(f"Two of --ranges overlap: {before} and {after}.", "Name each offset once.")
    return found


def repair(
    spark: SparkSession,
    cluster: Cluster,
    arguments: argparse.Namespace,
    ranges: Sequence[Range],
    lines: Lines,
    stop: Stop,
) -> None:
    """Replace the days that hold `ranges`. Raise PipelineError if the archive or the topic does not hold them."""
    where, started = table.location(arguments.archive, arguments.format), time.monotonic()
    # Read the version first. Then a commit in between makes the replacement fail.
    version, archive = table.version(spark, where), table.read(spark, where)
    progress = last_progress(spark, where)
    if progress is None:
        raise PipelineError(f"{where} holds no archive yet.", "Run `sluice-pipeline archive` first.")
    read_committed = arguments.isolation == "read_committed"
    check(ranges, progress, cluster, read_committed=read_committed)
    compacted = cluster.compacted({each.topic for each in ranges})
    if (DATA in archive.columns) != (arguments.value != "raw"):
        raise PipelineError(
            f"{where} {'has' if DATA in archive.columns else 'has no'} typed values.",
            "Give --value and its options as the archive was given them.",
        )
    readable = [part for each in ranges for part in without(each, progress.left_out)]
    stored = table.schema(spark, where)
    with Ticker(spark, lines, stop), table.ignoring_lost_files(spark):
        fresh = _fresh(spark, arguments, readable, stored, read_committed)
        try:
            days = _replace(archive, fresh, ranges, where, version, compacted)
        except (PySparkException, Py4JJavaError) as error:
            cause = explain(error).cause
            if not cause.startswith(LOST_FILE) or not table.is_iceberg(where):
                raise
            lines.say(f"{cause} The days are rebuilt from the files that are left.", event="damaged")
            left = _typed(arguments, table.readable(spark, where), stored)
            days = _replace(left, fresh, ranges, where, version, compacted)
    records = sum(each.records for each in ranges)
    lines.step(
        f"archived {records:,} offsets again, in {days} days of topics", records, time.monotonic() - started,
        event="repaired", days=days,
    )  # fmt: skip
    lines.say("run `sluice-pipeline verify` to prove the result", event="end")


def _replace(
    archive: DataFrame, fresh: DataFrame, ranges: Sequence[Range], where: str, version: int, compacted: Collection[str]
) -> int:
    """Replace the days that hold `ranges` with the other rows of `archive` and `fresh`. Return the number of days.

    Rows of the topics `compacted` stay even within `ranges` if `fresh` lacks them, because compaction removes records
    from a topic that its archive keeps.
    """
    inside = within(archive, ranges)
    if compacted:
        fresh = _newest(inside.where(F.col("topic").isin(sorted(compacted))), fresh)
    days = {
        (row.topic, row.date) for frame in (inside, fresh) for row in frame.select("topic", "date").distinct().collect()
    }
    named = archive.sparkSession.createDataFrame(sorted(days), "topic string, date date")
    kept = archive.join(F.broadcast(named), ["topic", "date"], "left_semi").join(
        inside.select("topic", "partition", "offset").distinct(), ["topic", "partition", "offset"], "left_anti"
    )
    table.replace(kept.unionByName(fresh, allowMissingColumns=True), where, version, sorted(days))
    return len(days)


def _newest(held: DataFrame, fresh: DataFrame) -> DataFrame:
    """Return the rows of `fresh`, and those of `held` whose offsets `fresh` lacks. A single pass reads both, so that a
    record that compaction removes in the meantime is in one of them.
    """
    place = Window.partitionBy("topic", "partition", "offset")
    both = held.withColumn("_fresh", F.lit(0)).unionByName(
        fresh.withColumn("_fresh", F.lit(1)), allowMissingColumns=True
    )
    return both.withColumn("_newest", F.max("_fresh").over(place)).where("_fresh = _newest").drop("_fresh", "_newest")


def check(ranges: Sequence[Range], progress: Progress, cluster: Cluster, *, read_committed: bool) -> None:
    """Raise PipelineError if the archive does not claim a range, or if its topic no longer has it."""
    logs = {
        (log.topic, log.partition): log
        for log in cluster.logs(sorted({each.topic for each in ranges}), read_committed=read_committed)
    }
    for each in ranges:
        key = (each.topic, each.partition)
        if key not in progress.next or not progress.first[key] <= each.start < each.end <= progress.next[key]:
            raise PipelineError(f"The archive does not claim {each}.", "Check --ranges; `archive` adds new records.")
        log = logs.get(key)
        if log is None or log.topic_id != progress.topic_ids[each.topic]:
            happened = "has been deleted" if log is None else "was deleted and created again"
            raise PipelineError(
                f"The topic {each.topic} {happened}, so {each} cannot be read again.",
                "Leave this range out of --ranges.",
            )
        if log.start > each.start:
            raise PipelineError(
                f"The topic holds {each.topic}-{each.partition} only from offset {log.start:,} on, not {each}.",
                "Name the offsets that the topic still holds; the others cannot be repaired.",
            )


def _fresh(
    spark: SparkSession,
    arguments: argparse.Namespace,
    ranges: Sequence[Range],
    stored: StructType,
    read_committed: bool,
) -> DataFrame:
    """Return the records of `ranges` as the topic has them, typed as the archive is."""
    if not ranges:
        return spark.createDataFrame([], RECORD)
    settings = kafka.settings_of(arguments.kafka_conf, "--kafka-conf")
    records = to_records(
        connector.read(spark, arguments.bootstrap, ranges, settings=settings, read_committed=read_committed)
    )
    return _typed(arguments, records, stored)


def _typed(arguments: argparse.Namespace, records: DataFrame, stored: StructType) -> DataFrame:
    """Return `records` with the columns of the archive if it is typed."""
    typing = values.typing_of(arguments, evolve=False)
    return records if typing is None else typing.apply(records, typed.stored_type(stored)).drop("reason")


if __name__ == "__main__":
    from pipeline.cli import main

    sys.exit(main(["repair", *sys.argv[1:]]))
