"""Replay an archive into topics, every record once, in order, through any crash.

The one idea: the offset map is a table. When all records of a batch are stored, its rows of the map are committed
together with the progress of the replay. After a crash the target may have records that the map lacks. They are
recognised and not written again (`produce.py`). Group offsets are translated by the map, in a step of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from confluent_kafka.admin import ConfigResource, NewTopic, ResourceType
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from pipeline import catalog, kafka, session, table
from pipeline.archive.job import RETRY_SECONDS, last_progress
from pipeline.archive.plan import Progress, Range
from pipeline.archive.start import milliseconds
from pipeline.errors import PipelineError, explain
from pipeline.jvm import analyzed
from pipeline.kafka import Cluster, Partition, UnreachableError
from pipeline.progress import Progress as Lines
from pipeline.progress import Stop
from pipeline.replay import compare, topics
from pipeline.replay.plan import Done, Plan, by_key, partition_map, source_ranges, topic_map
from pipeline.replay.produce import Writer
from pipeline.replay.transforms import in_order, select_records, summary, translate, with_targets, written
from pipeline.schema import OFFSET_MAP
from pipeline.ticker import Ticker
from pipeline.verify.compare import pieces, work_frame
from pipeline.verify.topic import TopicReader

APPLICATION = "sluice-replay"
MAX_TASKS = 64
_CLOCKS = re.compile(r"\b(?:current_(?:date|time|timestamp)|localtime|localtimestamp|now)\(")
"""Functions of SQL whose value is another at each start. Spark counts them as deterministic."""
_NOW = re.compile(r"\b(?:date|timestamp\w*)\s*['\"]\s*(?:now|today|tomorrow|yesterday)\b", re.IGNORECASE)
"""Literals of a time that Spark replaces by a fixed time at each start, before it shows the condition."""
_LITERALS = re.compile(r"'(?:[^'\\]|\\.)*'")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kafka.add_arguments(parser)
    what = parser.add_argument_group("what")
    what.add_argument("--archive", required=True, metavar="TABLE", help="the table that `archive` wrote")
    what.add_argument("--topic-map", metavar="A=B,…", help="archived topics and their targets: orders=orders-again")
    what.add_argument(
        "--partition-map", default="same", metavar="MAP",
        help="target partition of a record: same; SOURCE:TARGET,…; key, by Java's hash of the key over the target's "
        "partitions; or key:N, likewise for a target of N partitions (default %(default)s)",
    )  # fmt: skip
    what.add_argument("--from", dest="start", metavar="WHERE", help="a time, or JSON {topic: {partition: offset}}")
    what.add_argument("--until", metavar="WHERE", help="likewise; the offset or time itself is left out")
    what.add_argument("--filter", metavar="SQL", help='over the archive\'s columns, e.g. "value IS NOT NULL"')
    what.add_argument("--timestamps", choices=("keep", "now"), default="keep", help="(default %(default)s)")
    what.add_argument("--create-topics", action="store_true", help="create missing target topics as their sources were")
    what.add_argument(
        "--topic-config", action="append", default=[], metavar="NAME=VALUE",
        help="with --create-topics: a setting of each created topic. By default a topic gets its source's settings, "
        "and with --timestamps keep an unlimited retention, because its records are as old as the archive",
    )  # fmt: skip
    what.add_argument(
        "--replication-factor",
        type=int,
        default=-1,
        metavar="N",
        help="with --create-topics (default %(default)s: the broker decides)",
    )
    catalog.add_arguments(parser)
    how = parser.add_argument_group("how")
    how.add_argument(
        "--name", default="replay", help="name of the replay; the same name continues it (default %(default)s)"
    )
    how.add_argument("--map", metavar="TABLE", help="the table of the replay's offset map (default: ARCHIVE_NAME_map)")
    how.add_argument("--max-batch-records", type=int, default=1_000_000, metavar="N", help="(default %(default)s)")
    how.add_argument("--max-rate", type=float, metavar="N", help="records per second")
    how.add_argument("--no-compare", action="store_true", help="do not compare the targets with the archive at the end")
    how.add_argument(
        "--dry-run", action="store_true", help="report the records of each target partition, and write nothing"
    )
    groups = parser.add_argument_group("groups, when the replay is complete")
    groups.add_argument(
        "--translate-groups", metavar="A,B|all", help="set the groups' offsets in the targets; empty groups only"
    )


def run(arguments: argparse.Namespace, lines: Lines, stop: Stop) -> int:
    cluster = Cluster(arguments.bootstrap, kafka.settings_of(arguments.client_conf, "--client-conf"))
    cluster.existing()
    spark = session.open_session(session.options_of(arguments, f"sluice replay {arguments.name}"), lines)
    try:
        job = Replay(spark, cluster, arguments, lines, stop)
        if arguments.translate_groups is not None:
            job.translate_groups()
        elif arguments.dry_run:
            job.dry_run()
        else:
            job.run()
    except (AnalysisException, ParseException) as error:
        if arguments.filter is None:
            raise
        raise PipelineError(
            f"--filter cannot be used: {str(error).splitlines()[0]}", "Write SQL over the archive's columns."
        ) from error
    finally:
        spark.stop()
    return 0


class Replay:
    def __init__(
        self, spark: SparkSession, cluster: Cluster, arguments: argparse.Namespace, lines: Lines, stop: Stop
    ) -> None:
        self._spark, self._cluster, self._arguments = spark, cluster, arguments
        self._lines, self._stop = lines, stop
        self._archive = table.location(arguments.archive, arguments.format)
        self._map = table.location(
            arguments.map or f"{self._archive.rstrip('/')}_{arguments.name}_map", arguments.format
        )
        self._records = table.read(spark, self._archive)

    def run(self) -> None:
        done = self._begun()
        settle = done.batch > 0 or self._resumed
        bases, failures = self._bases(done), 0
        while not self._stop.asked:
            ranges = done.plan.batch(done.following)
            if not ranges:
                break
            started = time.monotonic()
            after = self._after(done, ranges)
            self._lines.say(
                f"batch {after.batch}: writes {_records(ranges):,} offsets", event="writing", batch=after.batch
            )
            try:
                with Ticker(self._spark, self._lines):
                    batch = self._write(done.plan, after.batch, ranges, bases, settle)
                    table.append(batch, self._map, APPLICATION, after.batch, after.to_json())
            except (PySparkException, Py4JJavaError) as error:
                # The writer recognises those records of this batch that are already stored.
                with contextlib.suppress(UnreachableError):
                    self._check_targets(done.plan)
                if failures == len(RETRY_SECONDS) or _is_final(error):
                    raise
                cause = explain(error).cause
                self._lines.say(f"a batch failed and is done again: {cause}", event="retry", cause=cause)
                self._stop.wait(RETRY_SECONDS[failures])
                failures, settle = failures + 1, True
                continue
            failures = 0
            rows = 0
            for (topic, partition), records in self._written(after.batch).items():
                bases[topic, partition] += records
                rows += records
            done, settle = after, False
            left = sum(each.end - done.following[each.topic, each.partition] for each in done.plan.ranges)
            self._lines.step(f"batch {done.batch}", rows, time.monotonic() - started, left, event="committed",
                             batch=done.batch)  # fmt: skip
        if not self._stop.asked:
            records = {key: end - done.plan.bases[key] for key, end in bases.items()}
            self._check_held(done.plan, records)
            if not self._arguments.no_compare:
                self._compare(done.plan, records)
        words = "stopped; start it again to go on" if self._stop.asked else "done"
        self._lines.say(f"{words}: the offset map is {self._map}", event="end")

    def dry_run(self) -> None:
        plan = self._plan(create=False)
        chosen = with_targets(select_records(self._records, plan, plan.ranges), plan)
        total = 0
        for row in summary(chosen).collect():
            total += row.records
            self._lines.say(
                f"{row.topic}-{row.partition} to {row.target_topic}-{row.target_partition}: {row.records:,} records, "
                f"{row.bytes:,} bytes, offsets {row.first:,} to {row.last:,}",
                event="would", records=row.records, bytes=row.bytes,
            )  # fmt: skip
        self._lines.say(f"would write {total:,} records; nothing was written", event="end", records=total)

    def translate_groups(self) -> None:
        if not table.exists(self._spark, self._map):
            raise PipelineError(f"There is no offset map at {self._map}.", "Replay first; its --name names the map.")
        done = self._last_done()
        if done is None or done.plan.batch(done.following):
            raise PipelineError(
                "The replay is not complete.", "Start it again without --translate-groups to finish it."
            )
        states = self._cluster.group_states()
        asked = self._arguments.translate_groups
        names = sorted(states) if asked == "all" else [name for name in asked.split(",") if name]
        rows = [
            (group, topic, partition, offset)
            for group in names
            if self._may_translate(group, states.get(group))
            for (topic, partition), offset in self._cluster.group_offsets(group).items()
            if topic in done.plan.topics
        ]
        committed = self._spark.createDataFrame(rows, "group string, topic string, partition int, offset long")
        mine = table.read(self._spark, self._map).where(F.col("replay") == self._arguments.name)
        translated: dict[str, dict[Partition, int]] = {}
        for row in translate(committed, mine).collect():
            translated.setdefault(row["group"], {})[row.target_topic, row.target_partition] = row.offset
        for group, offsets in translated.items():
            if not self._arguments.dry_run:
                self._cluster.alter_group_offsets(group, offsets)
            words = ", ".join(f"{topic}-{partition} {offset:,}" for (topic, partition), offset in offsets.items())
            self._lines.say(f"group {group} {'would go' if self._arguments.dry_run else 'goes'} to {words}",
                            event="translated", group=group)  # fmt: skip
        if not translated:
            self._lines.say("no group has offsets in the replayed topics", event="translated")

    def _may_translate(self, group: str, state: str | None) -> bool:
        if state == "EMPTY":
            return True
        words = "does not exist" if state is None else f"is {state.lower()}, not empty: stop its consumers first"
        self._lines.say(f"group {group} is left as it is: it {words}", event="skipped", group=group)
        return False

    # --- plan ---------------------------------------------------------------------------------------------------

    def _begun(self) -> Done:
        """Return the progress of the replay with this name. A new replay commits its plan before its first record."""
        table.create(self._spark, self._map, OFFSET_MAP)
        done = self._last_done()
        self._resumed = done is not None
        if done is None:
            plan = self._plan(create=self._arguments.create_topics)
            done = Done(plan, 0, {(each.topic, each.partition): each.start for each in plan.ranges})
            table.append(self._spark.createDataFrame([], OFFSET_MAP), self._map, APPLICATION, 0, done.to_json())
            self._lines.say(f"begins {plan.name}: {_records(plan.ranges):,} offsets", event="begin")
            return done
        asked = self._asked(sorted(done.plan.topics))
        if done.plan.span is None:
            asked["span"] = None
        if asked != done.plan.asked():
            unlike = [name for name, value in asked.items() if value != done.plan.asked()[name]]
            raise PipelineError(
                f"The replay {done.plan.name} was begun with another {unlike[0]}.",
                "Use the same options to continue it, or another --name for a new replay.",
            )
        self._check_targets(done.plan)
        self._lines.say(f"goes on with {done.plan.name} behind batch {done.batch}", event="continue")
        return done

    def _check_targets(self, plan: Plan) -> None:
        """Raise PipelineError if a target topic is not the same one as when the replay began."""
        there = {log.topic: log.topic_id for log in self._cluster.logs(sorted(plan.target_ids))}
        for topic, topic_id in plan.target_ids.items():
            if there.get(topic) != topic_id:
                words = "was deleted and created again" if topic in there else "has been deleted"
                raise PipelineError(
                    f"The target topic {topic} {words} since the replay began.",
                    "Give this replay another --name to begin anew.",
                )

    def _last_done(self) -> Done | None:
        for commit in table.commits(self._spark, self._map):
            found = Done.from_json(commit.metadata) if commit.metadata else None
            if found is not None:
                return found
        return None

    def _asked(self, topics: list[str]) -> dict[str, object]:
        return self._asked_plan(topics).asked()

    def _asked_plan(self, topics: list[str]) -> Plan:
        """Return a plan that only has the user's options."""
        given = self._arguments
        mapped = topic_map(given.topic_map, topics) if given.topic_map else None
        if mapped is None:
            raise PipelineError("No target topic is named.", "Name one with --topic-map orders=orders-again.")
        return Plan(
            name=given.name,
            archive=self._archive,
            topics=mapped,
            partitions=partition_map(given.partition_map),
            by_key=by_key(given.partition_map),
            condition=given.filter,
            from_ms=_time(given.start),
            until_ms=_time(given.until),
            timestamps=given.timestamps,
            ranges=(),
            batch_records=given.max_batch_records,
            target_ids={},
            bases={},
            span=json.dumps([_listed(_offsets(given.start, "--from")), _listed(_offsets(given.until, "--until"))]),
        )

    def _plan(self, *, create: bool) -> Plan:
        progress = last_progress(self._spark, self._archive)
        if progress is None:
            raise PipelineError(f"{self._archive} holds no archive yet.", "Run `sluice-pipeline archive` first.")
        # Read the table after the progress. Then the frame has at least the offsets that the progress claims.
        self._records = table.read(self._spark, self._archive)
        asked = self._asked_plan(sorted(progress.topic_ids))
        if asked.condition is not None:
            _check_filter(self._records, asked.condition)
        ranges = self._ranges(progress, asked.topics)
        targets = self._targets(asked, ranges, progress)
        self._make_topics(asked, progress, ranges, create=create)
        counts = self._counts(asked, targets)
        if asked.by_key is not None:
            targets = {(topic, partition) for topic, count in counts.items() for partition in range(count)}
        logs = {(log.topic, log.partition): log for log in self._cluster.logs(sorted({topic for topic, _ in targets}),
                                                                              read_committed=False)}  # fmt: skip
        for topic, partition in sorted(targets):
            if (topic, partition) not in logs and not self._arguments.dry_run:
                raise PipelineError(
                    f"The target topic {topic} has no partition {partition}.",
                    "Add partitions to it, map it with --partition-map, or let --create-topics make the topic.",
                )
        told = {key: logs[key] for key in targets if key in logs}
        return replace(
            asked,
            ranges=tuple(ranges),
            counts=counts,
            target_ids={log.topic: log.topic_id for log in told.values()},
            bases={key: log.end for key, log in told.items()},
        )

    def _targets(self, asked: Plan, ranges: list[Range], progress: Progress) -> set[Partition]:
        """Return the target partitions. With a map by key, these are all partitions of a topic that is created."""
        if asked.by_key is None:
            return {asked.target(each.topic, each.partition) for each in ranges}
        return {
            (asked.topics[each.topic], partition)
            for each in ranges
            for partition in range(asked.by_key or 1 + max(of for topic, of in progress.next if topic == each.topic))
        }

    def _counts(self, asked: Plan, targets: set[Partition]) -> dict[str, int]:
        """Return the partition count of each target topic, for a map by key. Raise PipelineError if it differs from the
        N of key:N.
        """
        if asked.by_key is None:
            return {}
        counts: dict[str, int] = {}
        for topic in sorted({topic for topic, _ in targets}):
            there = self._cluster.partitions_of(topic)
            if there and asked.by_key and there != asked.by_key:
                raise PipelineError(
                    f"The target topic {topic} has {there} partitions, not {asked.by_key}.",
                    "Use `--partition-map key` for the partitions that it has, or name a new topic.",
                )
            counts[topic] = there or sum(1 for name, _ in targets if name == topic)
        return counts

    def _ranges(self, progress: Progress, topics: Mapping[str, str]) -> list[Range]:
        first = _offsets(self._arguments.start, "--from")
        until = _offsets(self._arguments.until, "--until")
        return source_ranges(progress, topics, first, until)

    def _make_topics(self, asked: Plan, progress: Progress, ranges: list[Range], *, create: bool) -> None:
        """Create the missing target topics. Raise PipelineError if a topic is missing and may not be created, or if
        retention would remove its records.
        """
        given = kafka.settings_of(self._arguments.topic_config, "--topic-config")
        topics.check_given(given)
        existing = self._cluster.existing()
        wanted = topics.targets(asked, progress.next, progress.settings, given)
        missing = [each for each in wanted if each.topic not in existing]
        needed = {asked.topics[each.topic] for each in ranges}
        if missing and not create and not self._arguments.dry_run:
            lacking = [each.topic for each in missing if each.topic in needed]
            if lacking:
                raise PipelineError(
                    f"The target topic {lacking[0]} does not exist.", "Create it, or add --create-topics."
                )
        self._check_retention(asked, ranges, [each for each in missing if create], existing)
        for each in missing if create else ():
            self._cluster.create(
                NewTopic(each.topic, each.partitions, self._arguments.replication_factor, config=dict(each.settings))
            )
            words = f"created the topic {each.topic} with {each.partitions} partitions"
            if each.unlimited:
                before = ", ".join(f"{name}={value or 'default'}" for name, value in sorted(each.unlimited.items()))
                words += f"; its retention is unlimited (the source had {before}): set it when consumers have caught up"
            self._lines.say(words, event="created", topic=each.topic, partitions=each.partitions)

    def _check_retention(
        self, asked: Plan, ranges: list[Range], created: list[topics.Target], existing: set[str]
    ) -> None:
        """Refuse a given retention that removes records as soon as they arrive; warn if an existing topic has such
        a retention.

        Also refuse a topic whose broker replaces timestamps.
        """
        if asked.timestamps != "keep" or not ranges:
            return
        there = sorted({asked.topics[each.topic] for each in ranges} & existing)
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in there]
        limits = {resource.name: config for resource, config in self._cluster.configs(resources).items()}
        limits |= {each.topic: dict(each.settings) for each in created}
        for name, config in sorted(limits.items()):
            topics.check_timestamps(name, config)
        finite = {
            name: config
            for name, config in limits.items()
            if int(config.get(topics.RETENTION_MS, topics.UNLIMITED)) >= 0
        }
        if not finite:
            return
        oldest = self._oldest(asked, [each for each in ranges if asked.topics[each.topic] in finite])
        now = int(time.time() * 1000)
        for name, config in sorted(finite.items()):
            limit = config[topics.RETENTION_MS]
            if not topics.expiring(limit, config.get("cleanup.policy"), oldest.get(name), now):
                continue
            words = (
                f"retention.ms={limit} of the topic {name} removes records of {_day(oldest[name])}, the oldest that "
                "would be replayed"
            )
            if name not in existing:
                raise PipelineError(f"{words}.", "Leave retention.ms out of --topic-config, or use --timestamps now.")
            self._lines.say(
                f"WARNING {words}: set the topic's retention.ms to -1 first, or use --timestamps now",
                event="retention", topic=name,
            )  # fmt: skip

    def _oldest(self, asked: Plan, ranges: list[Range]) -> dict[str, int]:
        """Return the oldest timestamp in milliseconds that each target topic will get."""
        rows = (
            select_records(self._records, asked, ranges)
            .groupBy("topic")
            .agg(F.min(F.unix_millis("timestamp")).alias("oldest"))
            .collect()
        )
        return {asked.topics[row.topic]: row.oldest for row in rows}

    def _check_held(self, plan: Plan, records: Mapping[Partition, int]) -> None:
        """Compare the targets with the number of replayed records of each partition. Raise PipelineError if one of them
        no longer exists.
        """
        logs = self._cluster.logs(sorted(plan.target_ids), read_committed=False)
        held = topics.check_held(plan.bases, records, logs)
        self._lines.say(f"the targets hold all {held:,} records that were replayed", event="held", records=held)

    def _compare(self, plan: Plan, records: Mapping[Partition, int]) -> None:
        """Read the targets and compare them with the archive. Raise PipelineError if a record differs."""
        compacted = sorted(self._cluster.compacted(plan.target_ids))
        if compacted:
            self._lines.say(
                f"{', '.join(compacted)}: not compared, because compaction removes records", event="compacted"
            )
        bases = {key: base for key, base in plan.bases.items() if key[0] not in compacted}
        work = pieces(Range(*key, base, base + records[key]) for key, base in sorted(bases.items()))
        count = sum(each.records for each in work)
        if not count:
            return
        self._lines.say(f"compares {count:,} records with the archive", event="compare", records=count)
        started, keep = time.monotonic(), plan.timestamps == "keep"
        reader = compare.MarkedReader(TopicReader(self._cluster.settings, read_committed=False), keep)
        chosen = with_targets(select_records(self._records, plan, plan.ranges), plan)
        archived = compare.expected(chosen.where(~F.col("target_topic").isin(compacted)), keep_timestamps=keep)
        with Ticker(self._spark, self._lines, self._stop, "what was replayed stands"):
            held = work_frame(self._spark, work).mapInArrow(reader.records, compare.OUT_DDL)
            unlike = compare.unequal_partitions(compare.totals(archived), compare.totals(held)).collect()
            if unlike:
                differing = {(row.target_topic, row.target_partition) for row in unlike}
                again = work_frame(self._spark, [each for each in work if (each.topic, each.partition) in differing])
                rows = compare.unequal_marks(
                    archived.join(F.broadcast(self._spark.createDataFrame(unlike)), list(compare.KEYS)),
                    again.mapInArrow(reader.records, compare.OUT_DDL),
                )
                raise PipelineError(
                    f"The targets are not what the archive holds: {_shown(rows.orderBy('mark').first(), unlike[0])}.",
                    "Replay again under another --name, into a new topic.",
                )
        self._lines.step("compared", count, time.monotonic() - started, 0, event="compared")

    # --- batches ------------------------------------------------------------------------------------------------

    def _bases(self, done: Done) -> dict[Partition, int]:
        """Return the offset at which each target partition must end when the next batch begins."""
        bases = dict(done.plan.bases)
        if done.batch:
            for key, records in self._written(None).items():
                bases[key] += records
        return bases

    def _written(self, batch: int | None) -> dict[Partition, int]:
        rows = table.read(self._spark, self._map)
        if batch is not None:
            rows = rows.where(f"batch = {batch}")
        return {(row.target_topic, row.target_partition): row.records for row in written(rows).collect()}

    def _after(self, done: Done, ranges: list[Range]) -> Done:
        following = {**done.following, **{(each.topic, each.partition): each.end for each in ranges}}
        return Done(done.plan, done.batch + 1, following)

    def _write(
        self, plan: Plan, batch: int, ranges: list[Range], bases: Mapping[Partition, int], settle: bool
    ) -> DataFrame:
        tasks = max(1, min(len(plan.bases), self._spark.sparkContext.defaultParallelism, MAX_TASKS))
        rate = self._arguments.max_rate
        writer = Writer(
            name=plan.name,
            batch=batch,
            settings=self._cluster.settings,
            bases=dict(bases),
            keep_timestamps=plan.timestamps == "keep",
            settle=settle,
            records_per_second=rate / tasks if rate else None,
        )
        chosen = with_targets(select_records(self._records, plan, ranges), plan)
        return in_order(chosen, plan, tasks).mapInArrow(writer.write, OFFSET_MAP)


def _shown(row: Row | None, partition: Row) -> str:
    """Name a differing record by its source. If no single record differs, name its target partition."""
    if row is None:
        return f"{partition.target_topic}-{partition.target_partition} has other records"
    return f"in {row.target_topic}-{row.target_partition} the record of {row.mark or 'no source'}: {row.what}"


def _check_filter(records: DataFrame, condition: str) -> None:
    """Raise PipelineError if the filter may choose other records when the replay is continued or compared."""
    plan = analyzed(records.where(condition))
    clocks = _NOW.search(condition) or _CLOCKS.search(_LITERALS.sub("", plan.condition().sql()))
    if clocks or not plan.deterministic():
        raise PipelineError(
            f"--filter {condition} depends on the time or on chance, so a replay could not be continued.",
            "Write times as literals, such as TIMESTAMP '2026-01-31 12:00:00'.",
        )


def _is_final(error: Exception) -> bool:
    """Return whether the same batch would fail the same way again."""
    return isinstance(error, AnalysisException | ParseException) or "ForeignWriterError" in str(error)


def _records(ranges: list[Range] | tuple[Range, ...]) -> int:
    return sum(each.records for each in ranges)


def _day(timestamp_ms: int) -> str:
    """Return the day of a timestamp, or the number itself if it is outside of the calendar."""
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=timestamp_ms)).date().isoformat()
    except OverflowError:
        return f"{timestamp_ms} ms"


def _time(text: str | None) -> int | None:
    return None if text is None or text.lstrip().startswith("{") else milliseconds(text)


def _listed(offsets: Mapping[Partition, int]) -> list[tuple[str, int, int]]:
    return sorted((topic, partition, offset) for (topic, partition), offset in offsets.items())


def _offsets(text: str | None, option: str) -> dict[Partition, int]:
    if text is None or not text.lstrip().startswith("{"):
        return {}
    try:
        return {
            (topic, int(partition)): int(offset)
            for topic, of_topic in json.loads(text).items()
            for partition, offset in of_topic.items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise PipelineError(
            f"{option} {text} is not JSON of topics, partitions and offsets ({error}).",
            'Write it like {"orders": {"0": 1200, "1": 980}}.',
        ) from error


if __name__ == "__main__":
    from pipeline.cli import main

    sys.exit(main(["replay", *sys.argv[1:]]))
