"""Prove that an archive equals its topics.

The one idea: Spark reads the table, and librdkafka, in Spark's workers, reads the topics. Both sides are summed per
block of offsets; a block whose sums differ is compared record by record, and the first difference is named. Offsets
that the archive claims and the topic still holds can be proved; the report names the rest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from pipeline import catalog, kafka, session, table
from pipeline.archive import typed, values
from pipeline.archive.job import last_progress
from pipeline.archive.plan import Progress, Range
from pipeline.archive.transforms import misdated, within
from pipeline.errors import LOST_FILE, PipelineError, explain
from pipeline.kafka import Cluster
from pipeline.manifest import job as evidence
from pipeline.progress import Progress as Lines
from pipeline.progress import Stop
from pipeline.schema import DATA, RESCUED
from pipeline.ticker import Ticker
from pipeline.verify.compare import (
    Scope,
    pieces,
    rounds,
    scopes,
    unclaimed,
    unequal_blocks,
    unequal_offsets,
    unequal_ranges,
    work_frame,
)
from pipeline.verify.sums import BLOCK, BLOCK_SUMS, RECORD_SUMS, block_sums, record_sums
from pipeline.verify.topic import TopicReader

Comparison = Callable[[DataFrame, Sequence[Range]], list[str]]

DIFFERENT = 3
MAX_SHOWN = 20
ROUND_OFFSETS = 8_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kafka.add_arguments(parser, required=False)
    parser.add_argument("--archive", required=True, metavar="TABLE", help="the table that `archive` wrote")
    catalog.add_arguments(parser)
    parser.add_argument("--topics", default="", metavar="A,B", help="only these of the archive's topics")
    parser.add_argument("--isolation", choices=("read_committed", "read_uncommitted"), default="read_committed")
    values.add_value_arguments(
        parser.add_argument_group("typed", "options of a typed archive, as `archive` was given them")
    )

    instead = parser.add_argument_group("instead of the topics")
    instead.add_argument("--manifest", type=Path, metavar="FILE", help="compare with what `manifest` wrote")
    instead.add_argument(
        "--public-key", type=Path, metavar="FILE", help="require a signature of the manifest by this key's owner"
    )


def run(arguments: argparse.Namespace, lines: Lines, stop: Stop) -> int:
    if (arguments.bootstrap is None) == (arguments.manifest is None):
        raise PipelineError("The archive is compared either with its topics or with a manifest.",
                            "Give --bootstrap or --manifest.")  # fmt: skip
    if arguments.manifest is not None:
        spark = session.open_session(session.options_of(arguments, "sluice verify"), lines)
        try:
            return by_manifest(spark, arguments, lines, stop)
        finally:
            spark.stop()
    cluster = Cluster(arguments.bootstrap, kafka.settings_of(arguments.client_conf, "--client-conf"))
    cluster.existing()
    spark = session.open_session(session.options_of(arguments, "sluice verify"), lines)
    try:
        return Verification(spark, cluster, arguments, lines, stop).run()
    finally:
        spark.stop()


def by_manifest(spark: SparkSession, arguments: argparse.Namespace, lines: Lines, stop: Stop) -> int:
    """Return 0 if the archive has exactly the records that the manifest covers, otherwise `DIFFERENT`."""
    where = table.location(arguments.archive, arguments.format)
    only = [name for name in arguments.topics.split(",") if name]
    manifest = evidence.read(spark, arguments.manifest, arguments.public_key, lines)
    manifest = manifest.only(only) if only else manifest
    found = evidence.compare(spark, where, manifest, lines, stop)
    for words in found[:MAX_SHOWN]:
        lines.say(f"DIFFERS {words}", event="difference")
    if found:
        words = f"the archive is NOT what {arguments.manifest} names: {len(found):,} blocks differ; first: {found[0]}"
        lines.say(words, event="different")
        return DIFFERENT
    if not manifest.records:
        raise PipelineError("The manifest names no record, so it proves nothing.", "Check --topics.")
    lines.say(f"proved: {manifest.records:,} records of {where} are those that {arguments.manifest} names",
              event="proved", records=manifest.records)  # fmt: skip
    return 0


class Verification:
    def __init__(
        self, spark: SparkSession, cluster: Cluster, arguments: argparse.Namespace, lines: Lines, stop: Stop
    ) -> None:
        self._spark, self._cluster, self._lines, self._stop = spark, cluster, lines, stop
        self._path = table.location(arguments.archive, arguments.format)
        self._only = [name for name in arguments.topics.split(",") if name]
        self._read_committed = arguments.isolation == "read_committed"
        self._typing = values.typing_of(arguments, evolve=False)
        self._reader = TopicReader(cluster.settings, self._read_committed)

    def run(self) -> int:
        """Return 0 if all offsets that can be proved are equal, otherwise `DIFFERENT`."""
        # Read the progress first. Then the frame has at least the offsets that the progress claims.
        progress = last_progress(self._spark, self._path) if table.exists(self._spark, self._path) else None
        records = table.read(self._spark, self._path)
        if progress is None:
            raise PipelineError(f"{self._path} holds no archive yet.", "Run `sluice-pipeline archive` first.")
        unknown = sorted(set(self._only) - progress.topic_ids.keys())
        if unknown:
            raise PipelineError(
                f"The archive does not hold the topic {unknown[0]}.",
                f"It holds {', '.join(sorted(progress.topic_ids)) or 'no topic'}; check --topics.",
            )
        chosen = sorted(self._only or progress.topic_ids)
        logs = self._cluster.logs(chosen, read_committed=self._read_committed)
        told = [each for each in scopes(progress, logs) if each.topic in chosen]
        compacted = self._cluster.compacted({each.topic for each in told})
        try:
            differences = self._differences(records, progress, told, compacted)
        except (PySparkException, Py4JJavaError) as error:
            cause = explain(error).cause
            if not cause.startswith(LOST_FILE):
                raise
            self._lines.say(f"{cause} The table is read without it.", event="damaged")
            with table.ignoring_lost_files(self._spark):
                left = table.readable(self._spark, self._path)
                differences = [cause, *self._differences(left, progress, told, compacted)]
        return self._report(told, compacted, differences)

    def _differences(
        self, records: DataFrame, progress: Progress, told: Sequence[Scope], compacted: set[str]
    ) -> list[str]:
        found = self._unclaimed(records, progress)
        found += self._misdated(records, told) + self._mistyped(records, told)
        found += self._compare(records, [each for each in told if each.topic not in compacted], self._by_block)
        return found + self._compare(records, [each for each in told if each.topic in compacted], self._by_record)

    def _misdated(self, records: DataFrame, told: Sequence[Scope]) -> list[str]:
        """Name the records that a reader misses if the reader filters by date."""
        mine = records.where(F.col("topic").isin(sorted({each.topic for each in told})))
        with Ticker(self._spark, self._lines, self._stop):
            rows = misdated(mine).limit(MAX_SHOWN).collect()
        return [
            f"{row.topic}-{row.partition} {_offsets(row)}: the date is {row.date}, not the day of the timestamp"
            for row in rows
        ]

    def _mistyped(self, records: DataFrame, told: Sequence[Scope]) -> list[str]:
        """Name the records whose columns differ from their value, as far as the job can type the value itself."""
        if RESCUED not in records.columns:
            return []
        if self._typing is None:
            self._lines.say(
                f"{DATA} and {RESCUED} are not compared; give --value and its options as `archive` was given them",
                event="untyped",
            )
            return []
        mine = records.where(F.col("topic").isin(sorted({each.topic for each in told})))
        self._lines.say(f"types all values again, and compares {DATA} and {RESCUED}", event="types")
        with Ticker(self._spark, self._lines, self._stop):
            wrong = self._typing.mistyped(mine, typed.stored_type(records.schema))
            rows = unequal_ranges(wrong).orderBy("topic", "partition", "first").limit(MAX_SHOWN).collect()
        return [f"{row.topic}-{row.partition} {_offsets(row)}: {row.what}" for row in rows]

    def _unclaimed(self, records: DataFrame, progress: Progress) -> list[str]:
        mine = records.where(F.col("topic").isin(self._only)) if self._only else records
        with Ticker(self._spark, self._lines, self._stop):
            rows = unclaimed(mine, progress).collect()
            # An archive job may have added records, and has then claimed them.
            while rows and (later := last_progress(self._spark, self._path) or progress) != progress:
                progress = later
                rows = unclaimed(mine, progress).collect()
        return [
            f"{row.topic}-{row.partition}: {row['count']:,} records outside of what the archive claims" for row in rows
        ]

    def _compare(self, records: DataFrame, told: Sequence[Scope], how: Comparison) -> list[str]:
        """Compare in rounds, so that the job can report progress. A round has pieces of all
        partitions, as a batch has.
        """
        work = sorted(pieces(part for each in told for part in each.ranges), key=lambda part: (part.start, part))
        left = sum(part.records for part in work)
        if not work:
            return []
        self._lines.say(f"compares {left:,} offsets in {len(work)} pieces", event="compare", offsets=left)
        found: list[str] = []
        for some in rounds(work, ROUND_OFFSETS):
            if self._stop.asked:
                raise PipelineError("The job was stopped before all was compared.", "Start it again; it begins anew.")
            started, expected = time.monotonic(), sum(part.records for part in some)
            with Ticker(self._spark, self._lines, self._stop):
                found += how(records, some)
            left -= expected
            self._lines.step("compared", expected, time.monotonic() - started, left, event="compared")
            if len(found) >= MAX_SHOWN:
                break
        return found

    def _by_block(self, records: DataFrame, work: Sequence[Range]) -> list[str]:
        inside = within(records, work)
        unequal = unequal_blocks(block_sums(record_sums(inside)), self._topic(work, per_record=False))
        first = unequal.orderBy("topic", "partition", "block").limit(MAX_SHOWN).collect()
        if not first:
            return []
        blocks = [Range(row.topic, row.partition, row.block * BLOCK, (row.block + 1) * BLOCK) for row in first]
        cut = [part for block in blocks for part in _overlap(work, block)]
        return self._differing(inside, cut, compacted=False)

    def _by_record(self, records: DataFrame, work: Sequence[Range]) -> list[str]:
        return self._differing(within(records, work), work, compacted=True)

    def _differing(self, inside: DataFrame, work: Sequence[Range], *, compacted: bool) -> list[str]:
        archived = record_sums(within(inside, work))
        rows = (
            unequal_ranges(unequal_offsets(archived, self._topic(work, per_record=True), compacted=compacted))
            .orderBy("topic", "partition", "first")
            .limit(MAX_SHOWN)
            .collect()
        )
        return [f"{row.topic}-{row.partition} {_offsets(row)}: {row.what}" for row in rows]

    def _topic(self, work: Sequence[Range], *, per_record: bool) -> DataFrame:
        frame = work_frame(self._spark, work)
        if per_record:
            return frame.mapInArrow(self._reader.records, RECORD_SUMS)
        return frame.mapInArrow(self._reader.blocks, BLOCK_SUMS)

    def _report(self, told: Sequence[Scope], compacted: set[str], differences: list[str]) -> int:
        for each in told:
            ranges = ", ".join(f"{part.start:,} to {part.end - 1:,}" for part in each.ranges) or "nothing"
            words = [f"{each.topic}-{each.partition}: {ranges}", *each.remarks]
            if each.topic in compacted:
                words.append("the topic is compacted, so what it has removed cannot be proved")
            self._lines.say("; ".join(words), event="scope", topic=each.topic, partition=each.partition)
        for words in differences[:MAX_SHOWN]:
            self._lines.say(f"DIFFERS {words}", event="difference")
        proved = sum(each.records for each in told)
        if differences:
            self._lines.say(
                f"the archive is NOT what the topics hold; first: {differences[0]}. `sluice-pipeline repair` archives "
                "named offsets again",
                event="different",
            )
            return DIFFERENT
        if not proved and (any(each.remarks for each in told) or not told):
            raise PipelineError(
                "Nothing of the archive can be proved: its topics no longer hold what it does.",
                "Keep records in the topic until they are verified: a longer retention, or verify more often.",
            )
        self._lines.say(
            f"proved: {proved:,} offsets of {len(told)} partitions are the same in {self._path} and in their topics",
            event="proved", offsets=proved,
        )  # fmt: skip
        return 0


def _offsets(row: Row) -> str:
    """Name the offsets of a row of `unequal_ranges`."""
    if row.records == 1:
        return f"offset {row.first:,}"
    return f"offsets {row.first:,} to {row.last:,}, {row.records:,} records"


def _overlap(work: Sequence[Range], block: Range) -> list[Range]:
    cut = [
        Range(part.topic, part.partition, max(part.start, block.start), min(part.end, block.end))
        for part in work
        if (part.topic, part.partition) == (block.topic, block.partition)
    ]
    return [each for each in cut if each.end > each.start]


if __name__ == "__main__":
    from pipeline.cli import main

    sys.exit(main(["verify", *sys.argv[1:]]))
