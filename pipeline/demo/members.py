"""Consumers of the demonstration: real members of a real group that join and leave. One of them stops committing.

Each member logs what it processed, and `analyze --delivery` reads these logs. So the cost of a rebalance is known
exactly, while a coordinator alone could only estimate it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

import pyarrow as pa
import pyarrow.parquet as parquet
from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

JOIN_SECONDS = 30.0


Run: TypeAlias = tuple[str, str, int, str, int, int, int]
"""Group, topic, partition, member, time in milliseconds, first and last offset."""


@dataclass
class Log:
    """Runs of offsets that members processed, in the order of time."""

    rows: list[Run] = field(default_factory=list[Run])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, group_id: str, member_id: str, messages: list[Message]) -> None:
        at_ms = time.time_ns() // 1_000_000
        runs: list[list[Any]] = []
        last: dict[tuple[str, int], list[Any]] = {}
        for message in messages:
            place = cast("tuple[str, int]", (message.topic(), message.partition()))
            offset = message.offset()
            run = last.get(place)
            if run is not None and run[6] + 1 == offset:
                run[6] = offset
            else:
                run = last[place] = [group_id, *place, member_id, at_ms, offset, offset]
                runs.append(run)
        with self._lock:
            self.rows.extend(tuple(run) for run in runs)

    def write(self, folder: Path) -> int:
        """Write all rows as Parquet, and return their number."""
        folder.mkdir(parents=True, exist_ok=True)
        names = ("group_id", "topic", "partition", "member_id", "at_ms", "first_offset", "last_offset")
        kinds = (pa.string(), pa.string(), pa.int32(), pa.string(), pa.int64(), pa.int64(), pa.int64())
        with self._lock:
            columns = [pa.array([row[number] for row in self.rows], kind) for number, kind in enumerate(kinds)]
            parquet.write_table(pa.table(columns, names=list(names)), folder / "part-0.parquet")
            return len(self.rows)


class Member:
    """One consumer on a thread of its own. If `commits` is switched off, other members process its records again."""

    def __init__(self, bootstrap: str, group_id: str, topic: str, name: str, log: Log, **settings: Any) -> None:
        self.name, self.commits, self.processed = name, True, 0
        self._group_id, self._log = group_id, log
        self._ended = threading.Event()
        self._assigned = threading.Event()
        self._failure: Exception | None = None
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group_id,
                "client.id": name,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 6_000,
                "heartbeat.interval.ms": 500,
                "log_level": 0,
                **settings,
            }
        )
        self._topic = topic
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Member:
        self._thread.start()
        return self

    def wait_until_assigned(self) -> None:
        """Wait until the member has a partition. Raise RuntimeError if that takes too long."""
        if not self._assigned.wait(JOIN_SECONDS):
            raise RuntimeError(f"{self.name} was given no partition within {JOIN_SECONDS:.0f} s")

    def end(self) -> None:
        """Leave the group. If an error ended the member before, raise it."""
        self._ended.set()
        self._thread.join(JOIN_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(f"{self.name} did not end within {JOIN_SECONDS:.0f} s")
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._consumer.subscribe([self._topic], on_assign=self._took)
            while not self._ended.is_set():
                self._turn(self._consumer.consume(2_000, timeout=0.2))
        except Exception as error:  # noqa: BLE001 - the caller of the thread raises it again
            self._failure = error
        finally:
            self._leave()

    def _took(self, _consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        self._assigned.set()

    def _leave(self) -> None:
        """Release the partitions, then close. If librdkafka closes a consumer at the moment when the consumer learns of
        a rebalance, it waits for ever and keeps the interpreter's lock (confluentinc/librdkafka#4884).
        """
        self._consumer.unsubscribe()
        deadline = time.monotonic() + JOIN_SECONDS
        while self._consumer.assignment():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not release its partitions")
            self._consumer.poll(0.05)
        self._consumer.poll(0)
        self._consumer.close()

    def _turn(self, messages: list[Message]) -> None:
        read = [message for message in messages if message.error() is None]
        if not read:
            return
        member_id = self._consumer.memberid() or self.name
        self._log.add(self._group_id, member_id, read)
        self.processed += len(read)
        if self.commits:
            self._forgivingly(lambda: self._consumer.commit(asynchronous=False))

    @staticmethod
    def _forgivingly(commit: Callable[[], object]) -> None:
        """Ignore an error of the commit, because a rebalance may refuse it. The demonstration shows exactly this
        effect.
        """
        try:
            commit()
        except KafkaException as error:
            if not error.args or error.args[0].name() not in _REFUSALS:
                raise


_REFUSALS = frozenset(
    {
        "ILLEGAL_GENERATION",
        "REBALANCE_IN_PROGRESS",
        "UNKNOWN_MEMBER_ID",
        "_NO_OFFSET",
        "STALE_MEMBER_EPOCH",
        "FENCED_MEMBER_EPOCH",
        "_ASSIGNMENT_LOST",
    }
)
