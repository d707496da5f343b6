"""Keep a table of the newest row per key, from an archive: upserts, tombstones as deletes, Debezium's envelope.

The one idea: a batch is the archived offsets that the table has not seen yet; it is merged by key together with the
progress it makes, in one Delta commit. Each row carries its record's place, and only a newer place changes a row, so a
batch that is merged again changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pyspark.sql import SparkSession

from pipeline import delta, session, table
from pipeline.archive.job import last_progress
from pipeline.archive.plan import Range, share
from pipeline.archive.transforms import within
from pipeline.errors import PipelineError
from pipeline.kafka import Partition
from pipeline.latest.transforms import debezium, newest, plain
from pipeline.progress import Progress as Lines
from pipeline.progress import Stop
from pipeline.schema import NEWEST
from pipeline.ticker import Ticker

ENVELOPES = {"none": plain, "debezium": debezium}
# Within a partition the offset decides; a key that has moved to another partition is ordered by time.
NEWER = (
    "CASE WHEN old.partition = new.partition THEN new.offset > old.offset "
    "ELSE (new.timestamp, new.offset) > (old.timestamp, old.offset) END"
)


@dataclass(frozen=True, slots=True)
class Merged:
    """How far a table is: the next offset of the archive by partition."""

    archive: str
    envelope: str
    topics: tuple[str, ...]
    batch: int = 0
    run: str = ""
    next: Mapping[Partition, int] = field(default_factory=dict)

    def to_json(self) -> str:
        following = [[topic, partition, offset] for (topic, partition), offset in self.next.items()]
        told = {"archive": self.archive, "envelope": self.envelope, "topics": self.topics, "batch": self.batch}
        return json.dumps({"sluice_table": {**told, "run": self.run, "next": following}}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Merged | None:
        """None if it is not a table's."""
        try:
            told = json.loads(text)["sluice_table"]
        except (ValueError, KeyError, TypeError):
            return None
        following = {(topic, partition): offset for topic, partition, offset in told["next"]}
        return Merged(**{**told, "topics": tuple(told["topics"]), "next": following})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--archive", required=True, metavar="PATH", help="the Delta table that `archive` wrote")
    parser.add_argument("--out", required=True, metavar="PATH", help="the Delta table of the newest rows")
    parser.add_argument("--topics", default="", metavar="A,B", help="only these of the archive's topics")
    parser.add_argument(
        "--envelope", choices=tuple(ENVELOPES), default="none",
        help="of the values: none, where a value is its key's row, or Debezium's JSON (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--max-batch-records", type=int, default=2_000_000, metavar="N", help="(default %(default)s)")


def run(arguments: argparse.Namespace, lines: Lines, stop: Stop) -> int:
    if table.is_iceberg(arguments.archive) or table.is_iceberg(arguments.out):
        raise PipelineError("The job merges Delta tables only.", "Archive with --format delta.")
    spark = session.open_session(session.options_of(arguments, "sluice table"), lines)
    try:
        merge(spark, arguments, lines, stop)
    finally:
        spark.stop()
    return 0


def merge(spark: SparkSession, arguments: argparse.Namespace, lines: Lines, stop: Stop) -> None:
    """Merge what the archive holds now. PipelineError if the table was made otherwise, or another job merges too."""
    # Read before the progress: the frame holds at least what the progress claims.
    progress = last_progress(spark, arguments.archive) if table.exists(spark, arguments.archive) else None
    records = table.read(spark, arguments.archive)
    if progress is None:
        raise PipelineError(f"{arguments.archive} holds no archive yet.", "Run `sluice-pipeline archive` first.")
    topics = tuple(sorted(name for name in arguments.topics.split(",") if name)) or tuple(sorted(progress.topic_ids))
    unknown = sorted(set(topics) - progress.topic_ids.keys())
    if unknown:
        raise PipelineError(f"The archive does not hold the topic {unknown[0]}.", "Check --topics.")
    asked = Merged(arguments.archive, arguments.envelope, topics if arguments.topics else ())
    table.create(spark, arguments.out, NEWEST, ("topic",))
    done = last_merged(spark, arguments.out) or asked
    if replace(done, batch=0, run="", next={}) != asked:
        raise PipelineError(
            f"{arguments.out} was made with another --archive, --envelope or --topics.",
            "Give the same ones to go on with it, or name another --out.",
        )
    own = uuid.uuid4().hex
    while not stop.asked:
        backlog = [
            Range(topic, partition, done.next.get((topic, partition), progress.first[topic, partition]), end)
            for (topic, partition), end in sorted(progress.next.items())
            if topic in topics
        ]
        ranges = share([each for each in backlog if each.records > 0], arguments.max_batch_records)
        if not ranges:
            break
        started = time.monotonic()
        after = replace(
            done, batch=done.batch + 1, run=own,
            next={**done.next, **{(each.topic, each.partition): each.end for each in ranges}},
        )  # fmt: skip
        offsets = sum(each.records for each in ranges)
        lines.say(f"batch {after.batch}: merges {offsets:,} offsets", event="merging", batch=after.batch)
        with Ticker(spark, lines):
            changes = newest(ENVELOPES[arguments.envelope](within(records, ranges)))
            changed = delta.merge(changes, arguments.out, ("topic", "key"), NEWER, after.to_json())
        if last_merged(spark, arguments.out) != after:
            raise PipelineError(f"Another job merges into {arguments.out}.", "Stop one of the two.")
        done = after
        left = sum(each.records for each in backlog) - offsets
        lines.step(
            f"batch {after.batch} changed {changed:,} rows", offsets, time.monotonic() - started, left,
            event="committed", batch=after.batch, changed=changed,
        )  # fmt: skip
    words = "stopped; start it again to go on" if stop.asked else "done"
    lines.say(f"{words}: {arguments.out} is behind batch {done.batch}", event="end")


def last_merged(spark: SparkSession, path: str) -> Merged | None:
    """Return the progress in the last merge; None for a new table."""
    for commit in table.commits(spark, path):
        found = Merged.from_json(commit.metadata) if commit.metadata else None
        if found is not None:
            return found
    return None


if __name__ == "__main__":
    from pipeline.cli import main

    sys.exit(main(["table", *sys.argv[1:]]))
