"""The helpers of a scenario: the Spark session, the peer (the client on the other side) and new names, and functions
that read frames and streams.

The one idea: a scenario compares whole contents. `rows` and `texts` turn a frame into values in the order of partitions
and offsets. So a lost, repeated or moved record makes them differ from what the peer sent.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from tests.compat.spark.peer import Headers, Peer, Record, Stored

CONTROL_SECONDS = 90.0
WAIT_SECONDS = 90.0
POLL_SECONDS = 0.05

Body = Callable[["Run"], None]
SCENARIOS: dict[str, Body] = {}


class SkippedError(Exception):
    """This Spark lacks the feature; the message says why."""


def scenario(name: str) -> Callable[[Body], Body]:
    """Register a scenario. It passes if it returns, fails if it raises, and is skipped if it raises `SkippedError`."""

    def register(body: Body) -> Body:
        SCENARIOS[name] = body
        return body

    return register


@dataclass(frozen=True, slots=True)
class Read:
    """A row as Spark's connector returns it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    timestamp_type: int
    record: Record

    @property
    def stored(self) -> Stored:
        return Stored(self.partition, self.offset, self.record)


class Run:
    def __init__(self, name: str, spark: SparkSession, peer: Peer, control: str, directory: Path) -> None:
        self.name, self.spark, self.peer = name, spark, peer
        self._control, self._directory = control, directory
        self._checkpoints = 0
        self._queries: list[StreamingQuery] = []
        self.detail = ""

    # --- source -----------------------------------------------------------------------------------------------

    def batch(self, topic: str | None = None, **options: Any) -> DataFrame:
        """Read a batch; `topic` is short for `subscribe`. Options are given with underscores for dots."""
        return self._options(self.spark.read.format("kafka"), topic, options).load()

    def stream(self, topic: str | None = None, **options: Any) -> DataFrame:
        return self._options(
            self.spark.readStream.format("kafka"), topic, {"startingOffsets": "earliest", **options}
        ).load()

    def _options(self, reader: Any, topic: str | None, options: dict[str, Any]) -> Any:
        if topic is not None:
            options = {"subscribe": topic, **options}
        for name, value in {"kafka.bootstrap.servers": self.peer.bootstrap, **options}.items():
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            reader = reader.option(name.replace("_", "."), text)
        return reader

    # --- sink -------------------------------------------------------------------------------------------------

    def write(self, frame: DataFrame, topic: str | None = None, **options: Any) -> None:
        """Write a batch."""
        writer = frame.write.format("kafka").option("kafka.bootstrap.servers", self.peer.bootstrap)
        if topic is not None:
            writer = writer.option("topic", topic)
        for name, value in options.items():
            writer = writer.option(name.replace("_", "."), str(value))
        writer.save()

    def to_topic(self, frame: DataFrame, topic: str, checkpoint: str, **options: Any) -> DataStreamWriter:
        writer = (
            frame.writeStream.format("kafka")
            .option("kafka.bootstrap.servers", self.peer.bootstrap)
            .option("topic", topic)
            .option("checkpointLocation", checkpoint)
        )
        for name, value in options.items():
            writer = writer.option(name.replace("_", "."), str(value))
        return writer

    def to_batches(self, frame: DataFrame, batches: Batches, checkpoint: str) -> DataStreamWriter:
        return frame.writeStream.foreachBatch(batches.take).option("checkpointLocation", checkpoint)

    def checkpoint(self) -> str:
        """Return the path of a fresh checkpoint."""
        self._checkpoints += 1
        return str(self._directory / f"{self.name}-{self._checkpoints}")

    # --- streams ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self, writer: DataStreamWriter, **trigger: Any) -> Iterator[StreamingQuery]:
        """Run a query while the context lasts, then stop it. If the query ended by itself with an error, raise that
        error.
        """
        query = (writer.trigger(**trigger) if trigger else writer).start()
        self._queries.append(query)
        try:
            yield query
            failed = query.exception()
            if failed is not None:
                raise failed
        finally:
            query.stop()

    def available_now(self, writer: DataStreamWriter) -> StreamingQuery:
        """Run a query over all available records. Raise the error that ended the query, or AssertionError if it takes
        too long.
        """
        with self.running(writer, availableNow=True) as query:
            assert query.awaitTermination(WAIT_SECONDS), f"{self.name}: AvailableNow does not end"
        return query

    # --- the gateway ------------------------------------------------------------------------------------------

    def restart_gateway(self) -> None:
        self._post("/restart")

    def kill_gateway(self) -> None:
        self._post("/kill")

    def _post(self, path: str) -> None:
        with urllib.request.urlopen(
            urllib.request.Request(self._control + path, method="POST"), timeout=CONTROL_SECONDS
        ) as answer:
            answer.read()

    def end(self) -> None:
        for query in self._queries:
            query.stop()


class Batches:
    """A sink that keeps the rows of each micro-batch. A repeated batch must bring the same rows."""

    def __init__(self, fail_at: int | None = None) -> None:
        self._rows: dict[int, list[Read]] = {}
        self._lock = threading.Lock()
        self._fail_at = fail_at
        self.repeated: list[int] = []
        self.differing: list[int] = []

    def take(self, frame: DataFrame, batch_id: int) -> None:
        found = rows(frame)
        with self._lock:
            if batch_id in self._rows:
                self.repeated.append(batch_id)
                if self._rows[batch_id] != found:
                    self.differing.append(batch_id)
            self._rows[batch_id] = found
        if batch_id == self._fail_at:
            self._fail_at = None
            raise RuntimeError(f"batch {batch_id} fails after it has read")

    @property
    def with_rows(self) -> dict[int, list[Read]]:
        with self._lock:
            return {batch_id: found for batch_id, found in self._rows.items() if found}

    @property
    def rows(self) -> list[Read]:
        return sorted(
            (row for found in self.with_rows.values() for row in found),
            key=lambda row: (row.topic, row.partition, row.offset),
        )

    @property
    def texts(self) -> list[str]:
        return [(row.record.value or b"").decode() for row in self.rows]


def rows(frame: DataFrame) -> list[Read]:
    """Return all rows by topic, partition and offset."""
    headers = ["headers"] if "headers" in frame.columns else []
    found = frame.selectExpr(
        "topic", "partition", "offset", "unix_millis(timestamp) AS ms", "timestampType", "key", "value", *headers
    ).collect()
    return sorted((_read(row) for row in found), key=lambda row: (row.topic, row.partition, row.offset))


def texts(frame: DataFrame) -> list[str]:
    return [(row.record.value or b"").decode() for row in rows(frame)]


def _read(row: Row) -> Read:
    headers: Headers = ()
    if "headers" in row:
        headers = tuple((header.key, _bytes(header.value)) for header in row.headers or ())
    record = Record(_bytes(row.value), _bytes(row.key), headers)
    return Read(row.topic, row.partition, row.offset, row.ms, row.timestampType, record)


def _bytes(value: bytearray | None) -> bytes | None:
    return None if value is None else bytes(value)


def same(found: Sequence[Any], expected: Sequence[Any], what: str) -> None:
    """Assert that both are equal. The error names the counts and the first difference."""
    if list(found) == list(expected):
        return
    first = next(
        (index for index, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]),
        min(len(found), len(expected)),
    )
    raise AssertionError(
        f"{what}: {len(found)} instead of {len(expected)}; the first difference is at {first}: "
        f"{str(found[first : first + 1])[:150]} instead of {str(expected[first : first + 1])[:150]}"
    )


def wait_until(predicate: Callable[[], bool], what: str, query: StreamingQuery | None = None) -> None:
    """Evaluate the predicate until it is true. Raise the error that ended the query, or AssertionError if it takes too
    long."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not predicate():
        if query is not None and not query.isActive:
            raise query.exception() or AssertionError(f"{what}: the query has ended")
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_SECONDS:.0f} s"
        time.sleep(POLL_SECONDS)


def raises(body: Callable[[], Any], *words: str) -> None:
    """Assert that the body fails with a message that contains one of the words."""
    try:
        body()
    except Exception as error:
        text = str(error)
        assert any(word in text for word in words), f"none of {words} is in: {text[:300]}"
    else:
        raise AssertionError(f"no error; expected {' or '.join(words)}")
