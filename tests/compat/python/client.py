"""What a scenario asks of a client library; each suite implements it with the library's own words.

The one idea: blocking calls and plain values, so that a scenario reads the same whatever the library is like. What a
library does not have raises `UnsupportedError` with the reason, and the scenario is skipped with it.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.compat.python.child import Child, ProgramChild
from tests.compat.python.journal import Journal, Partition
from tests.compat.python.options import MemberOptions

STOP_SECONDS = 30.0
READ_SECONDS = 10.0
JOIN_SECONDS = 20.0
TRANSACTION_TIMEOUT_MS = 60_000
HEARTBEAT_INTERVAL_MS = 500
METADATA_MAX_AGE_MS = 1000
CLIENT_ID = "same-for-all"


class UnsupportedError(Exception):
    """The client cannot do it; the message says why."""


class FencedError(Exception):
    """Another member took the static member's name: FENCED_INSTANCE_ID."""


class ProducerFencedError(Exception):
    """Another producer took the transactional id: PRODUCER_FENCED, or the INVALID_PRODUCER_EPOCH of older versions."""


@dataclass(frozen=True, slots=True)
class Record:
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None


class Member(ABC, threading.Thread):
    """A consumer on a thread of its own: polls until told to stop, then closes in order, LeaveGroup included.

    `failures` takes what ended it; `fenced` is set when another took its static name, which is a failure unless it
    `expects_fencing`.
    """

    def __init__(self, options: MemberOptions, journal: Journal, failures: list[str]) -> None:
        super().__init__(name=options.name, daemon=True)
        self.options = options
        self.journal = journal
        self.failures = failures
        self.fenced = threading.Event()
        self.expects_fencing = False
        self.owned: set[Partition] = set()
        self.positions: dict[Partition, int] = {}
        self._stop_requested = threading.Event()
        self._topics: tuple[str, ...] | None = None

    def run(self) -> None:
        try:
            self.open()
            try:
                while not self._stop_requested.is_set():
                    topics, self._topics = self._topics, None
                    if topics is not None:
                        self.subscribe(topics)
                    self.poll_once()
            finally:
                self.close()
        except FencedError as error:
            self.fenced.set()
            if not self.expects_fencing:
                self.failures.append(f"{self.name}: {error!r}")
        except Exception as error:  # the thread's last frame: whatever happened belongs to the scenario
            self.failures.append(f"{self.name}: {error!r}")
        finally:
            self.journal.closed(self.name)

    def request_stop(self) -> None:
        self._stop_requested.set()

    def stop(self) -> None:
        """Close in order; AssertionError if that takes too long."""
        self.request_stop()
        self.join(STOP_SECONDS)
        assert not self.is_alive(), f"{self.name} did not close in {STOP_SECONDS:.0f} s"

    def change_topics(self, topics: Sequence[str]) -> None:
        """Subscribe to other topics before the next poll."""
        self._topics = tuple(topics)

    # --- what callbacks and polls report ----------------------------------------------------------------------

    def now_owns(self, partitions: set[Partition]) -> None:
        """For a callback that names all that is assigned."""
        self.gained(partitions - self.owned)

    def gained(self, partitions: set[Partition]) -> None:
        self.owned |= partitions
        self.journal.assigned(self.name, partitions)

    def gave_up(self, partitions: set[Partition], *, lost: bool = False) -> None:
        held = partitions & self.owned
        self.owned -= held
        for partition in held:
            self.positions.pop(partition, None)
        if lost:
            self.journal.lost(self.name, held)
        else:
            self.journal.revoked(self.name, held)

    def uncommitted(self, partitions: set[Partition]) -> dict[Partition, int]:
        """Positions to commit when `partitions` are about to be given up."""
        return {partition: self.positions[partition] for partition in partitions if partition in self.positions}

    def processed(self, topic: str, partition: int, offset: int) -> None:
        self.positions[topic, partition] = offset + 1
        self.journal.delivered(self.name, topic, partition, offset)

    # --- the library's part -----------------------------------------------------------------------------------

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def subscribe(self, topics: Sequence[str]) -> None: ...

    @abstractmethod
    def poll_once(self) -> None:
        """Poll for at most 100 ms and report what came. Raises FencedError."""

    @abstractmethod
    def close(self) -> None: ...


class Producer(ABC):
    @abstractmethod
    def send(self, topic: str, records: Sequence[tuple[int, Record]]) -> list[int]:
        """Send records to partitions and wait until all are acknowledged; their offsets. Raises what the library
        raises."""

    @abstractmethod
    def close(self) -> None: ...


class GroupReader(ABC):
    """A member of a group that commits nothing: whoever reads through it has a producer do that."""

    @abstractmethod
    def read(self, count: int, seconds: float = JOIN_SECONDS) -> list[tuple[int, int, Record]]:
        """The next `count` records with partitions and offsets; fewer if none comes for so long."""

    @abstractmethod
    def close(self) -> None: ...


class TransactionalProducer(Producer):
    """Made ready: who had its transactional id before is fenced, and its transaction aborted.

    Everything but `close` raises ProducerFencedError when another one has taken the id, and for the rest what the
    library raises.
    """

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def send_offsets(self, reader: GroupReader, group: str, positions: Mapping[Partition, int]) -> None:
        """Where the reader's group is to go on, once this transaction is committed."""

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...


class Reader(ABC):
    """A consumer of one partition without a group."""

    @abstractmethod
    def read(self, count: int, seconds: float = READ_SECONDS) -> list[tuple[int, Record]]:
        """The next `count` records with their offsets; fewer if none comes for so long."""

    @abstractmethod
    def seek(self, offset: int) -> None: ...

    @abstractmethod
    def seek_to_beginning(self) -> None: ...

    @abstractmethod
    def seek_to_end(self) -> None: ...

    @abstractmethod
    def bounds(self) -> tuple[int, int]:
        """First offset, and the one after the last."""

    @abstractmethod
    def offset_at(self, timestamp_ms: int) -> int | None:
        """Of the first record with at least this timestamp."""

    @abstractmethod
    def close(self) -> None: ...


class Client(ABC):
    """One library against one bootstrap server."""

    assignors: tuple[str, ...]
    """Names that `MemberOptions.assignor` may have."""

    member_class: type[Member]

    commits: tuple[str, ...] = ("auto", "revoke", "each")
    """Values of `MemberOptions.commit` that it can do."""

    null_headers = True
    """Whether its producer takes headers without a value."""

    empty_values = True
    """Whether its producer tells empty keys and values from absent ones."""

    sets_timestamps = True
    changes_topics = True
    deletes_groups = True

    ends_with_topic: str = ""
    """Why a member does not outlive a topic of its subscription; empty if it does."""

    drops_when_stopped = False
    """Whether a member that is stopped may lose what it has just read; then it is stopped while nothing flows."""

    no_admin: str = ""
    """Why it has no admin client; what scenarios need prepared is then done by another library."""

    no_upgrade = "it refuses a list of eager and cooperative assignors, so a group cannot be bounced over"
    """Why a group of it cannot go from eager to cooperative without a pause."""

    commit_where_topics_go = "auto"
    """`MemberOptions.commit` of members one of whose topics is deleted."""

    no_transactions: str = ""
    """Why it has none."""

    lists_stable_offsets = True
    """Whether the end of the log that a reader of committed records is told is the last stable offset."""

    not_fenced: str = ""
    """Why a static member of the library does not learn that another took its name; empty if it does."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    @staticmethod
    @abstractmethod
    def version() -> str: ...

    def member(self, options: MemberOptions, journal: Journal, failures: list[str]) -> Member:
        if options.assignor not in self.assignors:
            raise UnsupportedError(f"no {options.assignor} assignor")
        if options.commit not in self.commits:
            raise UnsupportedError("it commits on its own only")
        return self.member_class(options, journal, failures, self.bootstrap)  # type: ignore[call-arg]

    def spawn(self, program: str, options: MemberOptions, journal: Journal, failures: list[str]) -> Child:
        """A member in a process of its own; `program` is the suite's module."""
        return ProgramChild([sys.executable, "-m", program], self.bootstrap, options, journal)

    @abstractmethod
    def producer(self, *, compression: str = "none", idempotent: bool = True) -> Producer: ...

    @abstractmethod
    def reader(self, topic: str, partition: int, *, read_committed: bool = False) -> Reader: ...

    def transactional_producer(
        self, transactional_id: str, *, timeout_ms: int = TRANSACTION_TIMEOUT_MS
    ) -> TransactionalProducer:
        raise UnsupportedError("no transactions")

    def group_reader(self, group: str, topic: str) -> GroupReader:
        """Of committed records, from the beginning where the group has no offsets."""
        raise UnsupportedError("no transactions")

    @abstractmethod
    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Commit without being a member."""

    @abstractmethod
    def committed(self, group: str, topic: str, partition: int) -> int | None: ...

    # --- admin ------------------------------------------------------------------------------------------------

    @abstractmethod
    def create_topic(self, topic: str, partitions: int) -> None: ...

    @abstractmethod
    def delete_topic(self, topic: str) -> None: ...

    @abstractmethod
    def partitions(self, topic: str) -> int | None:
        """How many; None if there is no such topic."""

    @abstractmethod
    def add_partitions(self, topic: str, total: int) -> None: ...

    def topic_config(self, topic: str, name: str) -> str | None:
        raise UnsupportedError("no DescribeConfigs")

    def set_topic_config(self, topic: str, name: str, value: str) -> None:
        raise UnsupportedError("no AlterConfigs")

    def delete_records(self, topic: str, partition: int, before_offset: int) -> None:
        raise UnsupportedError("no DeleteRecords")

    def groups(self) -> set[str]:
        raise UnsupportedError("no ListGroups")

    def group_state(self, group: str) -> tuple[str, int]:
        """State as Kafka names it, and the number of members."""
        raise UnsupportedError("no DescribeGroups")

    def delete_group(self, group: str) -> None:
        raise UnsupportedError("no DeleteGroups")

    # --- what few have ----------------------------------------------------------------------------------------

    def leave_versions(self) -> Mapping[int, Mapping[str, Any]]:
        """LeaveGroup versions that the client can be made to send, each with `MemberOptions.extra` for it."""
        raise UnsupportedError("it always sends the version it negotiates")

    def raw_group(self, protocol_type: str, protocol: str, metadata: bytes, assignment: bytes) -> bytes:
        """Join as the only member of a group of any protocol type, and lead it; what SyncGroup answers."""
        raise UnsupportedError("its groups are of protocol type consumer")

    @abstractmethod
    def close(self) -> None:
        """Let go of connections."""


def wait_until(predicate: Any, what: str, seconds: float = 30.0) -> None:
    """Ask again and again, until true. AssertionError if it is not in time."""
    deadline = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.05)
