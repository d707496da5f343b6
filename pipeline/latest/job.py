"""Keep a table of the newest row per key, or of all its versions, from an archive.

Upserts, tombstones as deletes, Debezium's envelope.

The one idea: a batch consists of the archived offsets that the table has not seen yet. It is merged by key, together
with its progress, in one commit. Each row contains the place (partition and offset) of its record. Only a newer place
changes a row, so a batch that is merged again changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline import catalog, session, table
from pipeline.archive.job import last_progress
from pipeline.archive.plan import Range, share
from pipeline.archive.transforms import within
from pipeline.errors import PipelineError
from pipeline.kafka import Partition
from pipeline.latest.transforms import debezium, foreign, newest, plain, versions
from pipeline.partitioning import order as sorting
from pipeline.partitioning import partitions
from pipeline.progress import Progress as Lines
from pipeline.progress import Stop
from pipeline.schema import HISTORY, NEWEST
from pipeline.ticker import Ticker

ENVELOPES = {"none": plain, "debezium": debezium}
# Within a partition the offset decides. If a key has moved to another partition, the time decides.
NEWER = (
    "exists(new._ends, each -> each.partition = old.partition AND each.offset > old.offset) "
    "OR old.partition <> new.partition AND (new.timestamp, new.offset) > (old.timestamp, old.offset)"
)
APPLICATION = "sluice-table"
_BY_KEY = "old.topic = new.topic AND old.key = new.key"
_BY_VERSION = f"{_BY_KEY} AND old.partition = new.partition AND old.offset = new.offset"


def _set(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}` = new.`{name}`" for name in names)


def _insert(names: Sequence[str]) -> str:
    columns = ", ".join(f"`{name}`" for name in names)
    return f"INSERT ({columns}) VALUES ({', '.join(f'new.`{name}`' for name in names)})"


_ENDS = ("valid_to", "valid_to_offset")
NEWEST_CLAUSES = (
    f"WHEN MATCHED AND ({NEWER}) AND new.deleted THEN DELETE "
    f"WHEN MATCHED AND ({NEWER}) THEN UPDATE SET {_set(NEWEST.names)} "
    f"WHEN NOT MATCHED AND NOT new.deleted THEN {_insert(NEWEST.names)}"
)
HISTORY_CLAUSES = (
    f"WHEN MATCHED AND NOT ({' AND '.join(f'old.{name} <=> new.{name}' for name in _ENDS)}) "
    f"THEN UPDATE SET {_set(_ENDS)} WHEN NOT MATCHED THEN {_insert(HISTORY.names)}"
)


@dataclass(frozen=True, slots=True)
class Merged:
    """Progress of a table: the next offset of the archive, by partition."""

    archive: str
    envelope: str
    topics: tuple[str, ...]
    batch: int = 0
    run: str = ""
    history: bool = False
    next: Mapping[Partition, int] = field(default_factory=dict[Partition, int])
    topic_ids: Mapping[str, str] = field(default_factory=dict[str, str])
    """Ids of the merged topics. Tables of earlier releases have none."""

    def to_json(self) -> str:
        following = [[topic, partition, offset] for (topic, partition), offset in self.next.items()]
        told = {"archive": self.archive, "envelope": self.envelope, "topics": self.topics, "history": self.history}
        told |= {"batch": self.batch, "run": self.run, "next": following, "topic_ids": dict(self.topic_ids)}
        return json.dumps({"sluice_table": told}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Merged | None:
        """Return the progress in a commit's metadata, None if another job wrote the metadata."""
        try:
            told: dict[str, Any] = json.loads(text)["sluice_table"]
        except (ValueError, KeyError, TypeError):
            return None
        following = {(topic, partition): offset for topic, partition, offset in told["next"]}
        told |= {"topics": tuple(told["topics"]), "next": following}
        return Merged(**told)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--archive", required=True, metavar="TABLE", help="the table that `archive` wrote")
    parser.add_argument("--out", required=True, metavar="TABLE", help="the table of the newest rows")
    parser.add_argument("--history", action="store_true", help="keep every version of a row, and when it was valid")
    catalog.add_arguments(parser)
    parser.add_argument("--topics", default="", metavar="A,B", help="only these of the archive's topics")
    parser.add_argument(
        "--envelope", choices=tuple(ENVELOPES), default="none",
        help="form of the values: none (a value is its key's row), or Debezium's JSON (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--partition-by", default="topic", metavar="A,B",
        help="partitions of a new table: columns, day(COLUMN), hour(COLUMN), bucket(N,COLUMN) (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--sort-by", default="", metavar="A,B",
        help="columns that order the rows of a new table, when Iceberg writes a file and when `compact` merges some",
    )  # fmt: skip
    parser.add_argument("--max-batch-records", type=int, default=2_000_000, metavar="N", help="(default %(default)s)")


def run(arguments: argparse.Namespace, lines: Lines, stop: Stop) -> int:
    spark = session.open_session(session.options_of(arguments, "sluice table"), lines)
    try:
        merge(spark, arguments, lines, stop)
    finally:
        spark.stop()
    return 0


def merge(spark: SparkSession, arguments: argparse.Namespace, lines: Lines, stop: Stop) -> None:
    """Merge the records that the archive holds now.

    Raise PipelineError if the table was made with other options, or another job merges into it.
    """
    # Read the progress first. Then the frame has at least the offsets that the progress claims.
    archive, out = (table.location(each, arguments.format) for each in (arguments.archive, arguments.out))
    progress = last_progress(spark, archive) if table.exists(spark, archive) else None
    records = table.read(spark, archive)
    if progress is None:
        raise PipelineError(f"{archive} holds no archive yet.", "Run `sluice-pipeline archive` first.")
    topics = tuple(sorted(name for name in arguments.topics.split(",") if name)) or tuple(sorted(progress.topic_ids))
    unknown = sorted(set(topics) - progress.topic_ids.keys())
    if unknown:
        raise PipelineError(f"The archive does not hold the topic {unknown[0]}.", "Check --topics.")
    asked = Merged(archive, arguments.envelope, topics if arguments.topics else (), history=arguments.history)
    _create(spark, out, arguments)
    done = last_merged(spark, out)
    if done is None and not table.read(spark, out).isEmpty():
        raise PipelineError(
            f"{out} holds rows, but its log holds no progress of this job. Delta keeps a log for 30 days.",
            "Name another --out.",
        )
    done = done or asked
    if replace(done, batch=0, run="", next={}, topic_ids={}) != asked:
        raise PipelineError(
            f"{out} was made with another --archive, --envelope, --topics or --history.",
            "Use the same options to continue it, or name another --out.",
        )
    ids = {topic: progress.topic_ids[topic] for topic in topics}
    for topic, topic_id in sorted(ids.items()):
        if done.topic_ids.get(topic, topic_id) != topic_id:
            raise PipelineError(
                f"The topic {topic} was deleted and created again since {out} was made from it.",
                "Name another --out, because this table would miss the first records of the new topic.",
            )
    own = uuid.uuid4().hex
    # A table forgets its oldest commits, so its progress is committed again behind commits of other jobs.
    newest = next(table.commits(spark, out), None)
    must_renew = done.batch > 0 and newest is not None and newest.metadata is None
    while not stop.asked:
        backlog = [
            Range(topic, partition, done.next.get((topic, partition), progress.first[topic, partition]), end)
            for (topic, partition), end in sorted(progress.next.items())
            if topic in topics
        ]
        ranges = share([each for each in backlog if each.records > 0], arguments.max_batch_records)
        if not ranges and not must_renew:
            break
        started = time.monotonic()
        after = replace(
            done, batch=done.batch + 1, run=own, topic_ids={**done.topic_ids, **ids},
            next={**done.next, **{(each.topic, each.partition): each.end for each in ranges}},
        )  # fmt: skip
        offsets = sum(each.records for each in ranges)
        lines.say(f"batch {after.batch}: merges {offsets:,} offsets", event="merging", batch=after.batch)
        batch = within(records, ranges)
        with Ticker(spark, lines):
            if arguments.envelope == "debezium":
                _report_foreign(foreign(batch), lines)
            changed = merge_batch(ENVELOPES[arguments.envelope](batch), out, after)
        if last_merged(spark, out) != after:
            raise PipelineError(f"Another job merges into {out}.", "Stop one of the two jobs.")
        done, must_renew = after, False
        left = sum(each.records for each in backlog) - offsets
        told = "" if changed is None else f" changed {changed:,} rows"
        lines.step(
            f"batch {after.batch}{told}", offsets, time.monotonic() - started, left, event="committed",
            batch=after.batch, changed=changed,
        )  # fmt: skip
    words = "stopped; start it again to go on" if stop.asked else "done"
    lines.say(f"{words}: {out} is behind batch {done.batch}", event="end")


def _report_foreign(records: DataFrame, lines: Lines) -> None:
    """Print how many records the envelope leaves out, and where the first is."""
    place = F.struct("topic", "partition", "offset")
    found: Any = records.agg(F.count("*").alias("records"), F.min(place).alias("first")).first()
    if found.records:
        lines.say(
            f"left out {found.records:,} records whose value is not Debezium's JSON or lacks the row, the first is "
            f"{found.first.topic}-{found.first.partition} offset {found.first.offset:,}",
            event="foreign", records=found.records,
        )  # fmt: skip


def _create(spark: SparkSession, out: str, arguments: argparse.Namespace) -> None:
    """Create the table if it does not exist. An existing table keeps its partitions and order."""
    schema = HISTORY if arguments.history else NEWEST
    parts, order = partitions(arguments.partition_by, schema), sorting(arguments.sort_by, schema)
    table.create(spark, out, schema, parts, order)


def merge_batch(changes: DataFrame, out: str, after: Merged) -> int | None:
    """Merge a batch, and commit the progress with it. Return the number of changed rows if the format counts them."""
    if after.history:
        rows = versions(changes, table.read(changes.sparkSession, out))
        return table.merge(rows, out, _BY_VERSION, HISTORY_CLAUSES, APPLICATION, after.batch, after.to_json())
    return table.merge(newest(changes), out, _BY_KEY, NEWEST_CLAUSES, APPLICATION, after.batch, after.to_json())


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
