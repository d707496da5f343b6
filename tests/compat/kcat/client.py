"""kcat behind the interface of `tests.compat.python.client`: each member, producer and read is a process.

confluent-kafka creates topics and looks up committed offsets; kcat produces and consumes.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.compat.confluent.client import Confluent
from tests.compat.python.child import CHILD_SECONDS, Child
from tests.compat.python.client import (
    CLIENT_ID,
    HEARTBEAT_INTERVAL_MS,
    METADATA_MAX_AGE_MS,
    READ_SECONDS,
    FencedError,
    Member,
    Producer,
    Reader,
    Record,
)
from tests.compat.python.journal import Journal
from tests.compat.python.options import MemberOptions

COMMAND_SECONDS = 60.0
POLL_SECONDS = 0.1
CHUNK_BYTES = 1 << 16

# Eager output: "(memberid …): assigned: t [0], t [1]". Cooperative: "incremental assignment of 1 partition(s) (…): t
# [0]".
_rebalanced = re.compile(rb"% Group \S+ rebalanced(.*?)\):(.*)")
_partition = re.compile(rb"(\S+) \[(\d+)\]")
_delivered = re.compile(rb"% Message delivered to partition (\d+) \(offset (\d+)\)")
_queried = re.compile(r"\[\d+\] offset (-?\d+)")


class KcatMember(Member):
    """A member, `kcat -G`. Its stdout shows the records, and its stderr shows the rebalances."""

    def __init__(self, options: MemberOptions, journal: Journal, failures: list[str], bootstrap: str) -> None:
        super().__init__(options, journal, failures)
        properties = {
            "client.id": CLIENT_ID,
            "partition.assignment.strategy": options.assignor,
            "auto.offset.reset": "earliest",
            "auto.commit.interval.ms": 500,
            "session.timeout.ms": options.session_timeout_ms,
            "heartbeat.interval.ms": HEARTBEAT_INTERVAL_MS,
            "topic.metadata.refresh.interval.ms": METADATA_MAX_AGE_MS,
            "reconnect.backoff.max.ms": 500,
        }
        if options.instance_id is not None:
            properties["group.instance.id"] = options.instance_id
        topics = options.topics if options.pattern is None else (options.pattern,)
        self._command = [
            *("kcat", "-b", bootstrap, "-E", "-u", "-f", "%t %p %o\\n"),
            *(word for name, value in properties.items() for word in ("-X", f"{name}={value}")),
            *("-G", options.group, *topics),
        ]
        self.process: subprocess.Popen[bytes] | None = None
        self._pending = {"stdout": b"", "stderr": b""}
        self._errors: list[bytes] = []

    def open(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._selector = selectors.DefaultSelector()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ)

    def subscribe(self, topics: Sequence[str]) -> None:
        raise NotImplementedError("changes_topics is false")

    def poll_once(self) -> None:
        assert self.process is not None
        self._selector.select(POLL_SECONDS)
        self._take()
        if self.process.poll() is not None and not self._stop_requested.is_set():
            self._take()
            if any(b"fenced" in line.lower() for line in self._errors):
                raise FencedError(self._last_words())
            if self.process.returncode >= 0:
                raise RuntimeError(f"kcat ended with {self.process.returncode}: {self._last_words()}")
            self.request_stop()

    def close(self) -> None:
        """Close kcat in order by SIGTERM, and kill it if it does not end."""
        assert self.process is not None
        deadline = time.monotonic() + CHILD_SECONDS
        if self.process.poll() is None:
            self.process.terminate()
        while self.process.poll() is None and time.monotonic() < deadline:
            self._selector.select(POLL_SECONDS)
            self._take()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(f"kcat did not end in {CHILD_SECONDS:.0f} s")
        self._take()
        self._selector.close()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _take(self) -> None:
        """Read what arrived on both pipes.

        The two pipes have no common order, except that an assignment precedes its records. stdout is read first, so
        that all assignments printed before a record are known when the record is processed.
        """
        assert self.process is not None
        records = [line.split() for line in self._lines("stdout", self.process.stdout)]
        changes = self._lines("stderr", self.process.stderr)
        records = self._deliver(records)
        for line in changes:
            self._errors.append(line)
            found = _rebalanced.match(line)
            if found is None:
                continue
            partitions = {(topic.decode(), int(index)) for topic, index in _partition.findall(found[2])}
            if b"assign" in found[0]:
                self.gained(partitions - self.owned)
                records = self._deliver(records)
            else:
                self.gave_up(partitions)
        for topic, partition, offset in records:
            self.processed(topic.decode(), int(partition), int(offset))

    def _deliver(self, records: list[list[bytes]]) -> list[list[bytes]]:
        """Report the records of the partitions that the member owns, and return the other records."""
        others: list[list[bytes]] = []
        for record in records:
            topic, partition, offset = record[0].decode(), int(record[1]), int(record[2])
            if (topic, partition) in self.owned:
                self.processed(topic, partition, offset)
            else:
                others.append(record)
        return others

    def _lines(self, name: str, stream: Any) -> list[bytes]:
        with contextlib.suppress(BlockingIOError, ValueError):
            while chunk := os.read(stream.fileno(), CHUNK_BYTES):
                self._pending[name] += chunk
        *lines, self._pending[name] = self._pending[name].split(b"\n")
        return lines

    def _last_words(self) -> str:
        return b" | ".join(self._errors[-3:]).decode(errors="replace")


class KcatChild(Child):
    """A member whose kcat process is killed or stopped. The thread that reads from the process continues."""

    def __init__(self, member: KcatMember) -> None:
        self.name, self.journal, self.member = member.options.name, member.journal, member
        member.open()
        member.open = lambda: None  # type: ignore[method-assign]
        member.start()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self.member.process is not None
        return self.member.process

    def stop(self) -> None:
        self.member.stop()

    def end(self) -> None:
        super().end()
        self.member.request_stop()
        self.member.join(CHILD_SECONDS)


class KcatProducer(Producer):
    """A producer that runs one `kcat -P` per partition for plain values, and one per record for other records.

    No process is kept for later values, because kcat prints acknowledgements only after more input or at the end of its
    input.
    """

    def __init__(self, bootstrap: str, compression: str, idempotent: bool) -> None:
        self._command = [
            *("kcat", "-b", bootstrap, "-P", "-E", "-vvv", "-X", "topic.produce.offset.report=true"),
            *("-X", f"client.id={CLIENT_ID}", "-X", f"compression.codec={compression}"),
            *("-X", f"enable.idempotence={str(idempotent).lower()}", "-X", "linger.ms=0"),
        ]

    def send(self, topic: str, records: Sequence[tuple[int, Record]]) -> list[int]:
        if not all(_is_line(record) for _, record in records):
            return [self._send_one(topic, partition, record) for partition, record in records]
        values: dict[int, list[bytes]] = {}
        for partition, record in records:
            values.setdefault(partition, []).append(record.value or b"")
        processes = {partition: self._start(topic, partition) for partition in values}
        offsets = {
            partition: iter(self._send_lines(process, values[partition])) for partition, process in processes.items()
        }
        return [next(offsets[partition]) for partition, _ in records]

    def _start(self, topic: str, partition: int) -> subprocess.Popen[bytes]:
        command = [*self._command, "-t", topic, "-p", str(partition)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    @staticmethod
    def _send_lines(process: subprocess.Popen[bytes], values: list[bytes]) -> list[int]:
        try:
            _, said = process.communicate(b"".join(value + b"\n" for value in values), COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        offsets = sorted(int(offset) for _, offset in _delivered.findall(said))
        if process.returncode or len(offsets) != len(values):
            raise RuntimeError(f"kcat ended with {process.returncode}: {said[-500:].decode(errors='replace')}")
        return offsets

    def _send_one(self, topic: str, partition: int, record: Record) -> int:
        command = [*self._command, "-t", topic, "-p", str(partition)]
        for name, value in record.headers:
            command += ["-H", f"{name}={(value or b'').decode()}"]
        with _value_of(record) as (words, stdin):
            ended = subprocess.run(
                [*command, *words], input=stdin, capture_output=True, timeout=COMMAND_SECONDS, check=True
            )
        found = _delivered.search(ended.stderr)
        if found is None:
            raise RuntimeError(ended.stderr.decode(errors="replace"))
        return int(found[2])

    def close(self) -> None:
        """Do nothing: the producer holds no process between sends."""


class KcatReader(Reader):
    def __init__(self, bootstrap: str, topic: str, partition: int, read_committed: bool) -> None:
        isolation = "read_committed" if read_committed else "read_uncommitted"
        self._command = ["kcat", "-b", bootstrap, "-X", f"client.id={CLIENT_ID}", "-X", f"isolation.level={isolation}"]
        self._topic, self._partition = topic, partition
        self._next = "beginning"

    def read(self, count: int, seconds: float = READ_SECONDS) -> list[tuple[int, Record]]:
        """Return the records in the log. kcat ends at the end of the log and does not wait for later records."""
        position = ("-t", self._topic, "-p", str(self._partition), "-o", self._next)
        out = self._run(*("-C", *position, "-c", str(count), "-e", "-q", "-f", "%o %T %K %S %h\\n%k%s\\n"))
        found = list(_parse(out))
        if found:
            self._next = str(found[-1][0] + 1)
        return found

    def _run(self, *words: str) -> bytes:
        return subprocess.run(
            [*self._command, *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_SECONDS, check=True
        ).stdout

    def seek(self, offset: int) -> None:
        self._next = str(offset)

    def seek_to_beginning(self) -> None:
        self._next = "beginning"

    def seek_to_end(self) -> None:
        self._next = str(self.bounds()[1])

    def bounds(self) -> tuple[int, int]:
        return self._query(-2), self._query(-1)

    def offset_at(self, timestamp_ms: int) -> int | None:
        offset = self._query(timestamp_ms)
        return None if offset < 0 else offset

    def _query(self, timestamp_ms: int) -> int:
        out = self._run("-Q", "-t", f"{self._topic}:{self._partition}:{timestamp_ms}").decode()
        found = _queried.search(out)
        assert found is not None, out
        return int(found[1])

    def close(self) -> None:
        """Do nothing: no process exists between two reads."""


class Kcat(Confluent):
    member_class = KcatMember
    commits = ("auto",)
    null_headers = False
    empty_values = False
    sets_timestamps = False
    changes_topics = False
    ends_with_topic = "it ends when one of its topics is deleted, also with -E"
    # If kcat is stopped, it commits the record that it was about to print, but does not print it.
    drops_when_stopped = True
    no_admin = "it has no admin commands"
    no_transactions = "it makes one transaction of all that it is given, and can neither abort it nor leave it open"
    no_upgrade = "its librdkafka refuses a list of eager and cooperative assignors"

    @staticmethod
    def version() -> str:
        said = subprocess.run(
            ["kcat", "-V"], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True
        ).stdout
        kcat = re.search(r"Version (\S+)", said)
        library = re.search(r"librdkafka (\d[\w.]*)", said)
        return f"{kcat[1] if kcat else 'unknown'}, librdkafka {library[1] if library else 'unknown'}"

    def producer(self, *, compression: str = "none", idempotent: bool = True) -> Producer:
        return KcatProducer(self.bootstrap, compression, idempotent)

    def reader(self, topic: str, partition: int, *, read_committed: bool = False) -> Reader:
        return KcatReader(self.bootstrap, topic, partition, read_committed)

    def spawn(self, program: str, options: MemberOptions, journal: Journal, failures: list[str]) -> Child:
        return KcatChild(KcatMember(options, journal, failures, self.bootstrap))

    def leave_versions(self) -> Mapping[int, Mapping[str, Any]]:
        return {1: {}}


def _is_line(record: Record) -> bool:
    return record.key is None and not record.headers and bool(record.value) and b"\n" not in (record.value or b"")


@contextlib.contextmanager
def _value_of(record: Record) -> Iterator[tuple[list[str], bytes]]:
    """Yield the arguments and the stdin with which kcat sends this key and value. An empty line means null; any other
    value is a file.
    """
    key = (record.key or b"").decode()
    if record.value is None:
        yield ["-Z", "-K:"], f"{key}:\n".encode()
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "value"
        path.write_bytes(record.value)
        yield [*(["-k", key] if record.key is not None else []), str(path)], b""


def _parse(out: bytes) -> Iterator[tuple[int, Record]]:
    """Parse records printed by `%o %T %K %S %h\\n%k%s\\n`. A length of −1 means null."""
    position = 0
    while position < len(out):
        end = out.index(b"\n", position)
        offset, timestamp, key_bytes, value_bytes, headers = out[position:end].split(b" ", 4)
        key_length, value_length = max(int(key_bytes), 0), max(int(value_bytes), 0)
        start = end + 1
        key = out[start : start + key_length] if int(key_bytes) >= 0 else None
        value = out[start + key_length : start + key_length + value_length] if int(value_bytes) >= 0 else None
        named = [header.partition(b"=") for header in headers.split(b",") if header]
        pairs = tuple((name.decode(), content) for name, _, content in named)
        yield int(offset), Record(value, key, pairs, int(timestamp))
        position = start + key_length + value_length + 1
