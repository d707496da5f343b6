"""Archive topics into a Delta or Iceberg table, exactly once for every reader of the table.

The one idea: a batch is a set of offset ranges; it is read by Spark's connector and committed together with the
progress it makes, so the table is its own checkpoint. After a crash some files belong to no commit, and the next start
plans from the last commit. Each run reads its own commit back, and so detects another job that archives into the same
table.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline import catalog, connector, kafka, session, table
from pipeline.archive import figures, typed, unfit, values
from pipeline.archive.plan import Batch, Progress, Range, plan, plan_again, without
from pipeline.archive.start import starting_offsets
from pipeline.archive.transforms import to_records
from pipeline.errors import PipelineError, explain
from pipeline.kafka import Cluster, Log, Partition, UnreachableError
from pipeline.partitioning import Part
from pipeline.progress import Progress as Lines
from pipeline.progress import Stop
from pipeline.schema import ARCHIVE_PARTITIONS, DEAD_LETTER, RECORD
from pipeline.ticker import Ticker

APPLICATION = "sluice-archive"
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0)
MAX_LOST_PRINTED = 50
MAX_SKIPPED = 1_000
RENEWAL_SECONDS = 3_600.0
"""How often an idle job checks that the table's newest commit has its progress."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kafka.add_arguments(parser)
    what = parser.add_argument_group("what")
    what.add_argument("--topics", default="", metavar="A,B", help="topics by name")
    what.add_argument(
        "--pattern", metavar="REGEX", help="topics whose whole name matches, also topics that are created later"
    )
    what.add_argument(
        "--out", required=True, metavar="TABLE",
        help="a Delta table's folder, or a URL that Spark knows; with --format iceberg a name like lake.events",
    )  # fmt: skip
    what.add_argument(
        "--from", dest="start", default="earliest", metavar="WHERE",
        help="where partitions begin that the table does not hold yet: earliest, latest, a time "
        "(2026-01-31T12:00:00Z or milliseconds), or JSON {topic: {partition: offset}} (default %(default)s)",
    )  # fmt: skip
    what.add_argument(
        "--isolation",
        choices=("read_committed", "read_uncommitted"),
        default="read_committed",
        help="(default %(default)s)",
    )
    what.add_argument(
        "--on-data-loss",
        choices=("fail", "continue"),
        default="fail",
        help="if records or topics were removed before they were archived (default %(default)s)",
    )
    catalog.add_arguments(parser)
    values.add_arguments(parser)
    pace = parser.add_argument_group("pace")
    pace.add_argument(
        "--once", action="store_true", help="end when all records that the topics held at the start are archived"
    )
    pace.add_argument(
        "--interval", type=float, default=5.0, metavar="S", help="seconds between batches (default %(default)s)"
    )
    pace.add_argument("--max-batch-records", type=int, default=1_000_000, metavar="N", help="(default %(default)s)")
    pace.add_argument("--max-rate", type=float, metavar="N", help="records per second on average")
    shown = parser.add_argument_group("shown to others")
    shown.add_argument(
        "--group", metavar="NAME", help="commit progress as this group's offsets, so that tools for lag show it"
    )
    shown.add_argument("--metrics-port", type=int, metavar="PORT", help="serve Prometheus figures on loopback")
    shown.add_argument("--metrics-host", default="127.0.0.1", help="(default %(default)s)")


def run(arguments: argparse.Namespace, lines: Lines, stop: Stop) -> int:
    topics = [name for name in arguments.topics.split(",") if name]
    if not topics and arguments.pattern is None:
        raise PipelineError("No topics are named.", "Name topics with --topics or --pattern.")
    if arguments.max_batch_records < 1:
        raise PipelineError("--max-batch-records must be 1 or more.", "Leave it out for a million.")
    cluster = Cluster(arguments.bootstrap, kafka.settings_of(arguments.client_conf, "--client-conf"))
    chosen = cluster.topics(topics, arguments.pattern)
    if not chosen and arguments.once:
        raise PipelineError("No topic matches --pattern.", "Check it against a listing of topics.")
    spark = session.open_session(session.options_of(arguments, f"sluice archive to {Path(arguments.out).name}"), lines)
    try:
        Archive(spark, cluster, arguments, topics, lines, stop).run()
    finally:
        spark.stop()
    return 0


@dataclass(frozen=True, slots=True)
class Planned:
    batch: Batch
    logs: Sequence[Log]


class Archive:
    """One archive job: `step` plans, reads and commits a batch; `run` does so until the end or a stop."""

    def __init__(
        self,
        spark: SparkSession,
        cluster: Cluster,
        arguments: argparse.Namespace,
        topics: Sequence[str],
        lines: Lines,
        stop: Stop,
    ) -> None:
        self._spark, self._cluster, self._arguments = spark, cluster, arguments
        self._topics, self._lines, self._stop = topics, lines, stop
        self._out = table.location(arguments.out, arguments.format)
        self._dead_letters = values.dead_letter_table(arguments)
        self._run_id = uuid.uuid4().hex
        self._read_committed = arguments.isolation == "read_committed"
        self._typing = values.typing_of(arguments, evolve=arguments.evolve == "add")
        self._figures = figures.serve(arguments.metrics_host, arguments.metrics_port)
        self._progress = Progress()
        self._starting: dict[Partition, int] = {}
        self._settings: dict[str, dict[str, str]] = {}
        self._asked_settings: set[str] = set()
        self._group_ends: dict[Partition, int] = {}
        self._planned_before = False
        self._letters_may_be_ahead = True
        """True if an earlier run or a failed attempt may have committed the dead letters of a batch, and no records."""
        self._gone: set[str] = set()
        self._checked_renewal = -RENEWAL_SECONDS

    def run(self) -> None:
        self.open()
        self._say_start()
        until = self._ends() if self._arguments.once else None
        failures = 0
        while not self._stop.asked:
            started = time.monotonic()
            try:
                planned = self.step_once(until)
                failures = 0
            except PipelineError as error:
                if not isinstance(error, UnreachableError) or failures == len(RETRY_SECONDS):
                    raise
                self._say_retry(error, failures)
                failures += 1
                continue
            except (PySparkException, Py4JJavaError) as error:
                # The next plan finds the records that the log lost in the meantime. Any other error may be temporary.
                if failures == len(RETRY_SECONDS):
                    raise
                self._say_retry(explain(error), failures)
                failures += 1
                continue
            done = planned.batch.records
            if self._arguments.once and not done and planned.batch.left == 0:
                break
            self._pace(done, planned.batch.left, started)
        self._lines.say(
            f"{'stopped' if self._stop.asked else 'done'}: {self._out} holds "
            f"{sum(self._progress.next.values()) - sum(self._progress.first.values()):,} offsets of "
            f"{len(self._progress.next)} partitions, {len(self._progress.lost)} ranges lost",
            event="end",
        )

    def open(self) -> None:
        """Create the tables if they do not exist, and read the progress."""
        table.create(self._spark, self._out, RECORD, [Part(name) for name in ARCHIVE_PARTITIONS])
        if self._typing is not None:
            table.create(self._spark, self._dead_letters, DEAD_LETTER, [Part("topic")])
        self._progress = last_progress(self._spark, self._out) or Progress()
        self._check_dead_letters()

    def _check_dead_letters(self) -> None:
        """Raise PipelineError if the table of dead letters belongs to another archive. Its batches have the same
        numbers, so it would take the dead letters of this archive for committed ones.
        """
        letters = last_progress(self._spark, self._dead_letters) if self._has_dead_letters() else None
        if letters is None:
            return
        own = self._progress
        if letters.batch <= own.batch:
            fits = letters.first.items() <= own.first.items() and letters.topic_ids.items() <= own.topic_ids.items()
        else:
            # An earlier run has committed the dead letters of the next batch, and not the batch itself.
            fits = letters.batch == own.batch + 1 and own.first.items() <= letters.first.items()
            fits = fits and (bool(own.batch) or letters.topic_ids.keys() <= set(self._chosen()))
        if not fits:
            raise PipelineError(
                f"{self._dead_letters} holds dead letters of another archive, or of later batches than {self._out}.",
                "Name another table with --dead-letters, or remove that one.",
            )

    def _has_dead_letters(self) -> bool:
        return table.exists(self._spark, self._dead_letters)

    def step_once(self, until: Mapping[Partition, int] | None = None) -> Planned:
        """Plan, read and commit one batch, at most up to `until`."""
        planned = self._plan(until)
        self._step(planned)
        return planned

    def _say_start(self) -> None:
        if self._progress.batch:
            self._lines.say(f"goes on behind batch {self._progress.batch} of {self._out}", event="continue")
        else:
            self._lines.say(f"begins {self._out}", event="begin")

    def _say_retry(self, error: PipelineError, failures: int) -> None:
        seconds = RETRY_SECONDS[failures]
        self._lines.say(
            f"a batch failed and is done again in {seconds:.0f} s: {error.cause}", event="retry", cause=error.cause
        )
        self._stop.wait(seconds)

    def _chosen(self) -> list[str]:
        """Return the topics to archive that exist now. Raise PipelineError if an archived topic was deleted."""
        existing = self._cluster.existing()
        gone = sorted(
            name for name in {*self._topics, *self._progress.topic_ids} if name not in existing and self._wanted(name)
        )
        # A listing also leaves out topics that the user may no longer describe. Then this request raises an error.
        self._cluster.logs([name for name in gone if name not in self._gone])
        if gone and self._arguments.on_data_loss == "fail":
            raise PipelineError(
                f"The topic {gone[0]} has been deleted; the archive holds what was committed before.",
                "Leave it out of --topics, or use --on-data-loss continue to archive the others.",
            )
        for name in gone:
            if name not in self._gone:
                self._lines.say(f"the topic {name} has been deleted, the others go on", event="deleted", topic=name)
        self._gone = set(gone)
        names = [name for name in self._topics if name in existing]
        # A topic may be deleted between two requests, so both answers must come from one listing.
        return self._cluster.topics(names, self._arguments.pattern, existing=existing)

    def _wanted(self, name: str) -> bool:
        pattern = self._arguments.pattern
        return name in self._topics or (pattern is not None and re.fullmatch(pattern, name) is not None)

    def _ends(self) -> dict[Partition, int]:
        logs = self._cluster.logs(self._chosen(), read_committed=self._read_committed)
        return {(log.topic, log.partition): log.end for log in logs}

    def _plan(self, until: Mapping[Partition, int] | None) -> Planned:
        logs = self._passed(self._cluster.logs(self._chosen(), read_committed=self._read_committed))
        fresh = [
            log
            for log in logs
            if (log.topic, log.partition) not in self._progress.next
            and (log.topic, log.partition) not in self._starting
        ]
        if fresh:
            # Read this once per partition, because `latest` would move if a first batch is retried.
            self._starting |= self._start_of(fresh)
        self._planned_before = True
        if until is not None:
            logs = [log for log in logs if (log.topic, log.partition) in until]
        limit = self._arguments.max_batch_records
        if self._arguments.max_rate:
            limit = min(limit, max(1, int(self._arguments.max_rate * max(self._arguments.interval, 1.0))))
        batch = plan(self._progress, logs, self._starting, self._run_id, limit, until)
        batch = self._with_settings(batch, logs)
        unfinished = self._unfinished(batch)
        if unfinished is not None:
            batch = unfinished
        self._report_lost(batch.lost)
        return Planned(batch, logs)

    def _passed(self, logs: Sequence[Log]) -> Sequence[Log]:
        """Return `logs`, with later ends for those of which an earlier run has archived an open transaction, with
        --isolation read_uncommitted. Without this, the last stable offset would look like a truncated log.
        """
        held = self._progress.next
        early = {log.topic for log in logs if log.end < held.get((log.topic, log.partition), 0)}
        if not early or not self._read_committed:
            return logs
        ends = {(log.topic, log.partition): log.end for log in self._cluster.logs(sorted(early), read_committed=False)}

        def end(log: Log) -> int:
            key = (log.topic, log.partition)
            return max(log.end, min(held.get(key, 0), ends.get(key, 0)))

        return [replace(log, end=end(log)) for log in logs]

    def _start_of(self, fresh: Sequence[Log]) -> dict[Partition, int]:
        """Return the first offset of each partition that is new to the archive.

        `latest` means the end of the topic when the archive began. If a topic that matches --pattern appeared later,
        its first record is the start, because all its records are newer than the archive.
        """
        later = self._arguments.start == "latest" and (self._planned_before or self._progress.batch > 0)
        found = {(log.topic, log.partition): log.start for log in fresh if later and log.topic not in self._topics}
        rest = [log for log in fresh if (log.topic, log.partition) not in found]
        if not rest:
            return found
        begun = self._progress.next.keys() | self._starting.keys()
        return found | starting_offsets(self._cluster, rest, self._arguments.start, begun)

    def _with_settings(self, batch: Batch, logs: Sequence[Log]) -> Batch:
        """Add the topics' own settings to the progress. The job reads them once per topic."""
        fresh = sorted({log.topic for log in logs} - self._asked_settings)
        if fresh:
            self._settings |= self._cluster.own_settings(fresh)
            self._asked_settings |= set(fresh)
            for name in sorted(set(fresh) - self._settings.keys()):
                self._lines.say(
                    f"the settings of the topic {name} may not be read, so a restore creates it with its broker's "
                    "defaults; allow DescribeConfigs on the topic to archive them",
                    event="settings", topic=name,
                )  # fmt: skip
        # A topic may have been deleted since a batch with its first records failed.
        own = {name: self._settings[name] for name in batch.after.topic_ids.keys() & self._settings.keys()}
        return replace(batch, after=replace(batch.after, settings={**batch.after.settings, **own}))

    def _unfinished(self, batch: Batch) -> Batch | None:
        """Return a batch whose dead letters are committed but whose records are not, as an earlier run or an earlier
        attempt of this run planned it.
        """
        if not self._letters_may_be_ahead or not self._has_dead_letters():
            return None
        planned = last_progress(self._spark, self._dead_letters)
        if planned is None or planned.batch != batch.after.batch:
            return None
        # The earlier run may have archived more topics than this one.
        logs = self._cluster.logs(sorted(planned.topic_ids), read_committed=self._read_committed)
        again = plan_again(self._progress, planned, logs, batch.records + batch.left)
        # The logs may have lost all records of this batch, and still have later ones.
        return replace(again, left=max(0, again.left - again.records))

    def _report_lost(self, lost: Sequence[Range]) -> None:
        if not lost:
            return
        words = "; ".join(str(each) for each in lost[:MAX_LOST_PRINTED])
        records = sum(each.records for each in lost)
        if self._arguments.on_data_loss == "fail":
            raise PipelineError(
                f"{records:,} offsets were removed from their topic before they were archived: {words}.",
                "Use --on-data-loss continue to continue behind them, or give the topic a longer retention.",
            )
        self._lines.say(f"lost {records:,} offsets, removed before they were archived: {words}", event="lost", lost=[
            [each.topic, each.partition, each.start, each.end] for each in lost
        ])  # fmt: skip

    def _step(self, planned: Planned) -> None:
        """Read and commit one batch. Skip a batch that adds neither records nor partitions."""
        batch = planned.batch
        if not batch.ranges and not batch.lost and self._known(batch) and not self._must_renew():
            self._publish(planned, 0, 0.0)
            return
        started = time.monotonic()
        self._lines.say(
            f"batch {batch.after.batch}: reads {batch.records:,} offsets of {len(batch.ranges)} partitions",
            event="reading", batch=batch.after.batch,
        )  # fmt: skip
        self._letters_may_be_ahead = True
        with Ticker(self._spark, self._lines):
            try:
                self._store(batch)
            except (PySparkException, Py4JJavaError) as error:
                batch, letters = self._without_unfit(batch, error)
                self._store(batch, letters)
        # Another run may have planned and committed a batch with the same number.
        after, rows = self._committed(self._out, batch.after)
        self._progress, self._letters_may_be_ahead = after, False
        seconds = time.monotonic() - started
        self._publish(planned, rows, seconds)
        self._lines.step(
            f"batch {after.batch}", rows, seconds, batch.left, event="committed", batch=after.batch,
            partitions=len(batch.ranges),
        )  # fmt: skip

    def _without_unfit(self, batch: Batch, error: Exception) -> tuple[Batch, list[unfit.Row]]:
        """Return the batch without records whose timestamp does not fit, and return these as dead letters. If `error`
        has another cause, raise it.
        """
        if not unfit.is_cause(error):
            raise error
        try:
            found = unfit.find(self._cluster.settings, self._ranges(batch), read_committed=self._read_committed)
        except KafkaException as silent:
            raise self._cluster.unreachable(silent) from silent
        if not found.holes:
            raise error
        words = "; ".join(str(each) for each in found.holes[:MAX_LOST_PRINTED])
        self._lines.say(
            f"{len(found.letters):,} records have a timestamp that does not fit, and go to {self._dead_letters}: "
            f"{words}",
            event="unfit", records=len(found.letters),
        )  # fmt: skip
        skipped = (*batch.after.skipped, *found.holes)
        if len(skipped) > MAX_SKIPPED:
            raise PipelineError(
                f"Records of {len(skipped):,} ranges have a timestamp that no table can hold, the last of them "
                f"{skipped[-1]}.",
                "Correct the producer's clock, and archive the topic into another table from a later offset.",
            )
        # Ranges behind the last searched one belong to the next batch.
        starts = {(each.topic, each.partition): each.start for each in batch.ranges}
        ends = {(each.topic, each.partition): each.end for each in found.ranges}
        ranges = tuple(replace(each, end=ends[each.topic, each.partition]) for each in batch.ranges
                       if (each.topic, each.partition) in ends)  # fmt: skip
        after = replace(batch.after, next={**batch.after.next, **starts, **ends}, skipped=skipped)
        left = batch.left + batch.records - sum(each.records for each in ranges)
        return Batch(ranges, batch.lost, after, left), found.letters

    def _store(self, batch: Batch, letters: Sequence[unfit.Row] = ()) -> None:
        """Commit the dead letters of a batch, and then its records together with its progress."""
        records, after = self._records(batch), batch.after
        dead = None
        if letters:
            table.create(self._spark, self._dead_letters, DEAD_LETTER, [Part("topic")])
            dead = self._spark.createDataFrame(list(letters), DEAD_LETTER)
        if self._typing is not None and batch.ranges:
            records = self._typing.apply(records, self._stored_type())
            bad = typed.rejected(records)
            dead = bad if dead is None else bad.unionByName(dead)
            records = records.drop("reason")
        if dead is not None:
            table.append(dead, self._dead_letters, APPLICATION, after.batch, after.to_json())
            # If the dead letters of this number are another job's, this batch would be archived without its own.
            self._committed(self._dead_letters, after)
        table.append(
            records, self._out, APPLICATION, after.batch, after.to_json(), merge_schema=self._typing is not None
        )

    def _known(self, batch: Batch) -> bool:
        """Return whether the table has already recorded what this empty batch adds: partitions and
        their first offsets.
        """
        return batch.after.next == self._progress.next and bool(self._progress.batch)

    def _must_renew(self) -> bool:
        """Return whether commits of other jobs follow the progress. A table forgets its oldest commits, so an idle
        archive commits its progress again.
        """
        now = time.monotonic()
        if now - self._checked_renewal < RENEWAL_SECONDS:
            return False
        self._checked_renewal = now
        newest = next(table.commits(self._spark, self._out))
        return newest.metadata is None or Progress.from_json(newest.metadata) is None

    def _records(self, batch: Batch) -> DataFrame:
        ranges = self._ranges(batch)
        if not ranges:
            return self._spark.createDataFrame([], RECORD)
        rows = connector.read(
            self._spark,
            self._arguments.bootstrap,
            ranges,
            settings=kafka.settings_of(self._arguments.kafka_conf, "--kafka-conf"),
            read_committed=self._read_committed,
        )
        return to_records(rows)

    @staticmethod
    def _ranges(batch: Batch) -> list[Range]:
        """Return the batch's ranges without the offsets that the archive leaves out."""
        return [part for each in batch.ranges for part in without(each, batch.after.left_out)]

    def _stored_type(self) -> Any:
        return typed.stored_type(table.schema(self._spark, self._out))

    def _committed(self, where: str, after: Progress) -> tuple[Progress, int]:
        """Return the progress and the number of rows of this run's last commit to a table. Raise PipelineError if
        another run committed this batch.

        The progress may be another than `after`, if an earlier attempt committed the batch and its answer was lost.
        """
        for commit in table.commits(self._spark, where):
            found = Progress.from_json(commit.metadata) if commit.metadata else None
            if found is None:
                continue
            if (found.batch, found.run) != (after.batch, after.run):
                raise PipelineError(
                    f"Another archive job writes to {where}: batch {after.batch} is not this run's.",
                    "Stop one of the two jobs; the committed records are right.",
                )
            return found, commit.rows
        raise PipelineError(f"The log of {where} does not hold batch {after.batch}.", "Start the job again.")

    def _publish(self, planned: Planned, rows: int, seconds: float) -> None:
        positions = self._progress.next
        self._figures.batch(rows, seconds)
        for log in planned.logs:
            self._figures.lag(log.topic, log.partition, log.end - positions.get((log.topic, log.partition), log.start))
        if self._arguments.group:
            keys = sorted({(log.topic, log.partition) for log in planned.logs} & positions.keys())
            # An earlier run may have ended between the commit of its last batch and that of the group.
            ends = {key: positions[key] for key in keys if self._group_ends.get(key) != positions[key]}
            try:
                self._cluster.commit(self._arguments.group, ends)
                self._group_ends |= ends
            except KafkaException as error:
                # The records are committed; only the offsets of the consumer group are behind.
                self._lines.say(
                    f"the offsets of the group {self._arguments.group} cannot be committed: {error}", event="group"
                )

    def _pace(self, done: int, left: int, started: float) -> None:
        """Wait until the next batch is due. If records are left, it is due at once, unless a rate is set."""
        due = 0.0 if left else self._arguments.interval
        if self._arguments.once:
            due = 0.0
        if self._arguments.max_rate:
            due = max(due, done / self._arguments.max_rate)
        self._stop.wait(max(0.0, due - (time.monotonic() - started)))


def last_progress(spark: SparkSession, path: str) -> Progress | None:
    """Return the progress in the last committed batch; None for a new table."""
    for commit in table.commits(spark, path):
        found = Progress.from_json(commit.metadata) if commit.metadata else None
        if found is not None:
            return found
    held = (
        table.read(spark, path)
        .groupBy("topic", "partition")
        .agg(F.min("offset").alias("first"), F.max("offset").alias("last"))
        .collect()
    )
    if not held:
        return None
    raise PipelineError(
        f"The log of {path} no longer holds the archive's progress, though the table holds {len(held)} partitions.",
        "Archive into another table, with --from and the offsets that follow those of this table.",
    )


if __name__ == "__main__":
    from pipeline.cli import main

    sys.exit(main(["archive", *sys.argv[1:]]))
