"""The connector as a streaming source and sink: no record is lost or repeated, through restarts and failures."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from tests.compat.spark.peer import Record, by_partition
from tests.compat.spark.scenario import Batches, Run, raises, same, scenario, wait_until

FAST = "50 milliseconds"
STREAM_TO_FILES = "--stream-to-files"
LOSS_WORDS = ("OffsetOutOfRange", "data may have been lost", "KAFKA_DATA_LOSS")


@scenario("spark.stream.available-now")
def available_now(run: Run) -> None:
    """Stream topic to topic with keys, headers, nulls and partitions. Each run from the checkpoint reads only new
    records.
    """
    source, target = run.peer.create(2), run.peer.create(2)
    checkpoint = run.checkpoint()
    frame = run.stream(source, includeHeaders="true").select("key", "value", "headers", "partition")
    wanted: list[tuple[int, Record]] = []
    for turn in range(3):
        sent = [
            (0, Record(f"turn {turn}".encode(), b"k", (("h", b"v"), ("h", b"")))),
            (1, Record(None, b"tombstone")),
            *((index % 2, Record(str(index).encode())) for index in range(20)),
        ]
        run.peer.send(source, sent)
        wanted += sent
        query = run.available_now(run.to_topic(frame, target, checkpoint))
        assert sum(progress.numInputRows for progress in query.recentProgress) == len(sent), query.recentProgress
        stored = run.peer.read(target)
        for partition in (0, 1):
            same(
                [
                    Record(entry.record.value, entry.record.key, entry.record.headers)
                    for entry in stored
                    if entry.partition == partition
                ],
                [record for number, record in wanted if number == partition],
                f"turn {turn}, partition {partition}",
            )


@scenario("spark.stream.processing-time")
def processing_time(run: Run) -> None:
    """Stream topic to topic while records arrive: each arrives once, in order within its partition."""
    source, target = run.peer.create(3), run.peer.create(3)
    frame = run.stream(source, includeHeaders="true").select("key", "value", "headers", "partition")
    with (
        run.peer.feed(source, range(3)) as feed,
        run.running(run.to_topic(frame, target, run.checkpoint()), processingTime=FAST) as query,
    ):
        wait_until(lambda: len(_ran(query)) >= 4, "four batches", query)
        sent = feed.stop()
        query.processAllAvailable()
    same_numbers(run.peer.texts(target), sent)


@scenario("spark.stream.restart-from-checkpoint")
def restart_from_checkpoint(run: Run) -> None:
    """Stop the query three times while it runs. A repeated batch has the same rows, and there is no gap between
    batches.
    """
    source = run.peer.create(3)
    checkpoint, batches = run.checkpoint(), Batches()
    with run.peer.feed(source, range(3)) as feed:
        for _ in range(3):
            known = len(batches.with_rows)
            with run.running(run.to_batches(run.stream(source), batches, checkpoint), processingTime=FAST) as query:
                wait_until(lambda known=known: len(batches.with_rows) >= known + 2, "two more batches", query)
        sent = feed.stop()
    run.available_now(run.to_batches(run.stream(source), batches, checkpoint))
    assert not batches.differing, f"batches {batches.differing} differed when they were run again"
    same_numbers(batches.texts, sent)
    run.detail = f"{len(batches.with_rows)} batches, {len(batches.repeated)} of them run twice"


@scenario("spark.stream.failed-batch")
def failed_batch(run: Run) -> None:
    """A batch fails after it has read its records. It is repeated with the same offsets, although more records exist by
    then.
    """
    source = run.peer.create(2)
    checkpoint, batches = run.checkpoint(), Batches(fail_at=1)
    run.peer.fill(source, (0, 1), range(10))
    writer = run.to_batches(run.stream(source), batches, checkpoint)
    run.available_now(writer)
    run.peer.fill(source, (0, 1), range(10, 20))
    raises(lambda: run.available_now(writer), "fails after it has read")
    run.peer.fill(source, (0, 1), range(20, 30))
    run.available_now(run.to_batches(run.stream(source), batches, checkpoint))
    assert (batches.repeated, batches.differing) == ([1], []), (batches.repeated, batches.differing)
    same(batches.texts, [f"{partition}:{number}" for partition in (0, 1) for number in range(30)], "rows")


@scenario("spark.stream.crash")
def crash(run: Run) -> None:
    """The Spark process is killed (−9) while it streams. Another one continues from the checkpoint, and each row
    arrives once.
    """
    source, checkpoint, files = run.peer.create(2), run.checkpoint(), run.checkpoint()
    with run.peer.feed(source, (0, 1)) as feed:
        child = spawn(source, checkpoint, files)
        try:
            wait_until(lambda: _offsets(checkpoint) >= 4 or child.poll() is not None, "four batches of the other Spark")
            assert child.poll() is None, f"the other Spark ended with {child.returncode}"
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        sent = feed.stop()
    run.available_now(to_files(run, source, checkpoint, files))
    found = run.spark.read.parquet(files).orderBy("partition", "offset")
    same_numbers([row.text for row in found.selectExpr("CAST(value AS STRING) AS text").collect()], sent)
    run.detail = f"killed after batch {_offsets(checkpoint)}"


def spawn(source: str, checkpoint: str, files: str) -> subprocess.Popen[bytes]:
    """Start a separate Spark process, the leader of a process group. It streams a topic to files until it is killed."""
    return subprocess.Popen(
        [*sys.orig_argv, STREAM_TO_FILES, source, checkpoint, files],
        env={**os.environ, "TMPDIR": str(Path(checkpoint).parent)},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
    )


def to_files(run: Run, source: str, checkpoint: str, files: str) -> DataStreamWriter:
    frame = run.stream(source).select("partition", "offset", "value")
    return frame.writeStream.format("parquet").option("path", files).option("checkpointLocation", checkpoint)


def _offsets(checkpoint: str) -> int:
    """Return the number of the last planned batch, or −1."""
    return max((int(path.name) for path in Path(checkpoint, "offsets").glob("[0-9]*")), default=-1)


@scenario("spark.stream.max-offsets-per-trigger")
def max_offsets_per_trigger(run: Run) -> None:
    source = run.peer.create(4)
    run.peer.fill(source, range(4), range(15))
    batches = Batches()
    frame = run.stream(source, maxOffsetsPerTrigger=12)
    query = run.available_now(run.to_batches(frame, batches, run.checkpoint()))
    sizes = [len(found) for found in batches.with_rows.values()]
    assert max(sizes) <= 12, sizes
    assert sum(sizes) == 60, sizes
    same(batches.texts, [f"{partition}:{number}" for partition in range(4) for number in range(15)], "rows")
    starts_where_it_ended(query)


@scenario("spark.stream.min-partitions")
def min_partitions(run: Run) -> None:
    """Several tasks read ranges of one partition at once."""
    source = run.peer.create(2)
    run.peer.fill(source, (0, 1), range(60))
    batches = Batches()
    options = {"minPartitions": 5, "maxRecordsPerPartition": 25}
    run.available_now(run.to_batches(run.stream(source, **options), batches, run.checkpoint()))
    same(batches.texts, [f"{partition}:{number}" for partition in (0, 1) for number in range(60)], "rows")


@scenario("spark.stream.min-offsets-per-trigger")
def min_offsets_per_trigger(run: Run) -> None:
    """A batch waits for enough records, or for maxTriggerDelay."""
    source = run.peer.create()
    run.peer.fill(source, (0,), range(5))
    batches = Batches()
    frame = run.stream(source, minOffsetsPerTrigger=50, maxTriggerDelay="60s")
    with run.running(run.to_batches(frame, batches, run.checkpoint()), processingTime=FAST) as query:
        wait_until(lambda: len(batches.rows) == 5, "the first batch takes what there is", query)
        run.peer.fill(source, (0,), range(5, 30))
        idle = Idle()
        run.spark.streams.addListener(idle)
        try:
            wait_until(lambda: idle.count >= 2, "triggers that find too few", query)
        finally:
            run.spark.streams.removeListener(idle)
        run.peer.fill(source, (0,), range(30, 60))
        wait_until(lambda: len(batches.rows) == 60, "55 more", query)
    assert [len(found) for found in batches.with_rows.values()] == [5, 55], batches.with_rows
    same(batches.texts, [f"0:{number}" for number in range(60)], "rows")


class Idle(StreamingQueryListener):
    """Counts triggers for which no batch ran."""

    def __init__(self) -> None:
        self.count = 0

    def onQueryStarted(self, event: QueryStartedEvent) -> None: ...  # noqa: N802

    def onQueryProgress(self, event: QueryProgressEvent) -> None: ...  # noqa: N802

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        self.count += 1

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None: ...  # noqa: N802


@scenario("spark.stream.starting-latest")
def starting_latest(run: Run) -> None:
    source = run.peer.create(2)
    run.peer.fill(source, (0, 1), range(10))
    batches = Batches()
    frame = run.stream(source, startingOffsets="latest")
    with run.running(run.to_batches(frame, batches, run.checkpoint()), processingTime=FAST) as query:
        wait_until(lambda: bool(query.recentProgress), "the first trigger", query)
        run.peer.fill(source, (0, 1), range(10, 15))
        query.processAllAvailable()
    same(batches.texts, [f"{partition}:{number}" for partition in (0, 1) for number in range(10, 15)], "rows")


@scenario("spark.stream.starting-timestamp")
def starting_timestamp(run: Run) -> None:
    """Partition 0 has records from that time on. Partition 1 has none, and the query starts at its end."""
    source = run.peer.create(2)
    base_ms = int(time.time() * 1000) - 100_000
    run.peer.send(
        source,
        [(0, Record(f"0:{number}".encode(), timestamp_ms=base_ms + number * 1000)) for number in range(10)]
        + [(1, Record(b"1:0", timestamp_ms=base_ms))],
    )
    batches, checkpoint = Batches(), run.checkpoint()
    start = {"startingTimestamp": base_ms + 7000, "startingOffsetsByTimestampStrategy": "latest"}
    run.available_now(run.to_batches(run.stream(source, **start), batches, checkpoint))
    same(batches.texts, ["0:7", "0:8", "0:9"], "rows")
    run.peer.send(source, [(1, Record(b"1:1", timestamp_ms=base_ms))])
    run.available_now(run.to_batches(run.stream(source, **start), batches, checkpoint))
    same(batches.texts, ["0:7", "0:8", "0:9", "1:1"], "rows from the checkpoint")


@scenario("spark.stream.partition-added")
def partition_added(run: Run) -> None:
    """Partitions added while the query runs are read from their beginning."""
    source = run.peer.create(2)
    batches = Batches()
    with (
        run.peer.feed(source, (0, 1)) as feed,
        run.running(run.to_batches(run.stream(source), batches, run.checkpoint()), processingTime=FAST) as query,
    ):
        wait_until(lambda: bool(batches.with_rows), "the first batch", query)
        run.peer.add_partitions(source, 4)
        early = run.peer.fill(source, (2, 3), range(1_000_000, 1_000_010))
        wait_until(lambda: {row.partition for row in batches.rows} == {0, 1, 2, 3}, "rows of all partitions", query)
        late = run.peer.fill(source, (2, 3), range(1_000_010, 1_000_020))
        sent = feed.stop()
        query.processAllAvailable()
    same_numbers(batches.texts, sent + early + late)


@scenario("spark.stream.topic-added")
def topic_added(run: Run) -> None:
    """A topic that matches the pattern and is created while the query runs is read from its beginning."""
    prefix = run.peer.create()
    batches = Batches()
    run.peer.fill(prefix, (0,), range(5))
    frame = run.stream(subscribePattern=f"{prefix}.*")
    with run.running(run.to_batches(frame, batches, run.checkpoint()), processingTime=FAST) as query:
        wait_until(lambda: len(batches.rows) == 5, "the first topic", query)
        added = run.peer.create(2, name=f"{prefix}-added")
        run.peer.fill(added, (0, 1), range(5))
        wait_until(lambda: len(batches.rows) == 15, "both topics", query)
        query.processAllAvailable()
    assert len(batches.rows) == 15, "each once"
    assert {(row.topic, row.partition) for row in batches.rows} == {(prefix, 0), (added, 0), (added, 1)}


@scenario("spark.stream.topic-deleted")
def topic_deleted(run: Run) -> None:
    """With failOnDataLoss=false a topic of the pattern may be deleted, and the query continues with the other."""
    prefix = run.peer.create()
    other = run.peer.create(name=f"{prefix}-other")
    run.peer.fill(prefix, (0,), range(5))
    run.peer.fill(other, (0,), range(5))
    batches = Batches()
    frame = run.stream(subscribePattern=f"{prefix}.*", failOnDataLoss="false")
    with run.running(run.to_batches(frame, batches, run.checkpoint()), processingTime=FAST) as query:
        wait_until(lambda: len(batches.rows) == 10, "both topics", query)
        run.peer.delete(other)
        run.peer.fill(prefix, (0,), range(5, 10))
        wait_until(lambda: len(batches.rows) == 15, "the topic that stays", query)
    same([row.offset for row in batches.rows if row.topic == prefix], range(10), "offsets")


@scenario("spark.stream.fail-on-data-loss")
def fail_on_data_loss(run: Run) -> None:
    """The test deletes records behind the checkpoint. The query fails, or exactly those records are missing."""
    source = run.peer.create(2)
    checkpoint, batches = run.checkpoint(), Batches()
    run.peer.fill(source, (0, 1), range(10))
    run.available_now(run.to_batches(run.stream(source), batches, checkpoint))
    run.peer.fill(source, (0, 1), range(10, 30))
    run.peer.delete_records(source, 0, 17)
    strict = run.to_batches(run.stream(source, failOnDataLoss="true"), batches, checkpoint)
    raises(lambda: run.available_now(strict), *LOSS_WORDS)
    lenient = run.to_batches(run.stream(source, failOnDataLoss="false"), batches, checkpoint)
    run.available_now(lenient)
    found = by_partition(batches.texts)
    same(found["0"], [*range(10), *range(17, 30)], "partition 0, of which 10 to 16 are deleted")
    same(found["1"], range(30), "partition 1")


@scenario("spark.stream.read-committed")
def read_committed(run: Run) -> None:
    """All records of committed transactions arrive, no record of an aborted one, and no record twice."""
    source, target = run.peer.create(2), run.peer.create(2)
    checkpoint = run.checkpoint()
    frame = run.stream(source, kafka_isolation_level="read_committed").select("value", "partition")
    for first in (0, 100):
        with run.peer.transaction(source, (0, 1), range(first, first + 10)):
            pass
        with run.peer.transaction(source, (0, 1), range(first + 10, first + 20), abort=True):
            pass
        with run.peer.transaction(source, (0, 1), range(first + 20, first + 30)):
            run.available_now(run.to_topic(frame, target, checkpoint))
        run.available_now(run.to_topic(frame, target, checkpoint))
    committed = [number for first in (0, 100) for number in (*range(first, first + 10), *range(first + 20, first + 30))]
    found = by_partition(run.peer.texts(target))
    assert found == {"0": committed, "1": committed}, found


@scenario("spark.stream.offsets-by-consumer")
def offsets_by_consumer(run: Run) -> None:
    """In Spark's older way to find partitions and offsets, a consumer in the driver is a member of a real group."""
    source = run.peer.create(2)
    batches = Batches()
    prefix = f"g-{source}"
    frame = run.stream(source, groupIdPrefix=prefix, kafka_metadata_max_age_ms=200)
    run.spark.conf.set("spark.sql.streaming.kafka.useDeprecatedOffsetFetching", "true")
    try:
        with (
            run.peer.feed(source, (0, 1)) as feed,
            run.running(run.to_batches(frame, batches, run.checkpoint()), processingTime=FAST) as query,
        ):
            wait_until(lambda: len(batches.with_rows) >= 3, "three batches", query)
            assert [name for name in run.peer.groups() if name.startswith(prefix)], "no group"
            run.peer.add_partitions(source, 3)
            added = run.peer.fill(source, (2,), range(10))
            sent = feed.stop()
            wait_until(lambda: {row.partition for row in batches.rows} == {0, 1, 2}, "the added partition", query)
            query.processAllAvailable()
    finally:
        run.spark.conf.unset("spark.sql.streaming.kafka.useDeprecatedOffsetFetching")
    same_numbers(batches.texts, sent + added)


@scenario("spark.stream.continuous")
def continuous(run: Run) -> None:
    """Continuous processing: long-lived tasks that poll, and epochs that record their offsets."""
    source, target = run.peer.create(), run.peer.create()
    checkpoint = run.checkpoint()
    frame = run.stream(source).select("value", "partition")
    first = run.peer.fill(source, (0,), range(20))
    with run.running(run.to_topic(frame, target, checkpoint), continuous="200 milliseconds") as query:
        wait_until(lambda: sum(run.peer.ends(target).values()) >= 20, "the first records", query)
        second = run.peer.fill(source, (0,), range(20, 40))
        wait_until(lambda: sum(run.peer.ends(target).values()) >= 40, "the next records", query)
    same_numbers(run.peer.texts(target), first + second)


@scenario("spark.stream.gateway-restart")
def gateway_restart(run: Run) -> None:
    _outage(run, run.restart_gateway)


@scenario("spark.stream.gateway-kill")
def gateway_kill(run: Run) -> None:
    _outage(run, run.kill_gateway)


def _outage(run: Run, act: Callable[[], None]) -> None:
    source, target = run.peer.create(2), run.peer.create(2)
    frame = run.stream(source).select("value", "partition")
    with (
        run.peer.feed(source, (0, 1)) as feed,
        run.running(run.to_topic(frame, target, run.checkpoint()), processingTime=FAST) as query,
    ):
        wait_until(lambda: len(_ran(query)) >= 3, "batches before", query)
        act()
        fed, ran = feed.count, len(_ran(query))
        wait_until(lambda: feed.count > fed + 50 and len(_ran(query)) >= ran + 3, "batches after", query)
        sent = feed.stop()
        query.processAllAvailable()
    same_numbers(run.peer.texts(target), sent)


def same_numbers(found: list[str], sent: list[str]) -> None:
    """Assert that each partition has its numbers once and in order."""
    given, wanted = by_partition(found), by_partition(sent)
    for partition, numbers in wanted.items():
        same(given.get(partition, []), numbers, f"partition {partition}")
    assert given.keys() == wanted.keys(), sorted(given)


def _ran(query: StreamingQuery) -> list[StreamingQueryProgress]:
    return [progress for progress in query.recentProgress if progress.numInputRows]


def starts_where_it_ended(query: StreamingQuery) -> None:
    """Assert that each batch of a query starts at the offsets where the previous one ended."""
    sources = [progress.sources[0] for progress in _ran(query)]
    for before, after in itertools.pairwise(sources):
        assert json.loads(before.endOffset) == json.loads(after.startOffset), (before.endOffset, after.startOffset)
