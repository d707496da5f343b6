"""Interface between scenarios and a client library, implemented by each suite.

The one idea: calls block and values are plain, so that a scenario reads the same for every library. A missing feature
raises `UnsupportedError` with the reason, and the scenario is skipped with it.
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
READ_SECONDS = 45.0
JOIN_SECONDS = 30.0
TRANSACTION_TIMEOUT_MS = 60_000
HEARTBEAT_INTERVAL_MS = 500
METADATA_MAX_AGE_MS = 1000
CLIENT_ID = "same-for-all"


class UnsupportedError(Exception):
    """The client lacks the feature; the message says why."""


class FencedError(Exception):
    """Another member uses the instance id now: FENCED_INSTANCE_ID."""


class ProducerFencedError(Exception):
    """Another producer uses the transactional id now: PRODUCER_FENCED, or INVALID_PRODUCER_EPOCH in older versions."""


@dataclass(frozen=True, slots=True)
class Record:
    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None


class Member(ABC, threading.Thread):
    """A consumer on a thread of its own. It polls until it is stopped.

    Then it leaves the group and closes. `failures` receives the error that ended the member. `fenced` is set if another
    member took over its instance id. That is a failure unless the member `expects_fencing`.
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
        # This is the thread's outermost function, so any exception is a failure of the scenario.
        except Exception as error:
            self.failures.append(f"{self.name}: {error!r}")
        finally:
            self.journal.closed(self.name)

    def request_stop(self) -> None:
        self._stop_requested.set()

    def stop(self) -> None:
        """Leave the group and close. Raise AssertionError if that takes too long."""
        self.request_stop()
        self.join(STOP_SECONDS)
        assert not self.is_alive(), f"{self.name} did not close in {STOP_SECONDS:.0f} s"

    def change_topics(self, topics: Sequence[str]) -> None:
        """Subscribe to other topics before the next poll."""
        self._topics = tuple(topics)

    # --- reports of callbacks and polls -----------------------------------------------------------------------

    def now_owns(self, partitions: set[Partition]) -> None:
        """Record an assignment. This is for a callback that names all assigned partitions."""
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
        """Return the positions to commit when `partitions` are about to be revoked."""
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
        """Poll for at most 100 ms and report the records. Raise FencedError."""

    @abstractmethod
    def close(self) -> None: ...


class Producer(ABC):
    @abstractmethod
    def send(self, topic: str, records: Sequence[tuple[int, Record]]) -> list[int]:
        """Send records to partitions, wait until all are acknowledged, and return their offsets. The library's errors
        are raised.
        """

    @abstractmethod
    def close(self) -> None: ...


class GroupReader(ABC):
    """A member of a group that does not commit offsets itself: a producer commits them in its transactions."""

    @abstractmethod
    def read(self, count: int, seconds: float = JOIN_SECONDS) -> list[tuple[int, int, Record]]:
        """Return the next `count` records with partitions and offsets, or fewer if none arrives within `seconds`."""

    @abstractmethod
    def close(self) -> None: ...


class TransactionalProducer(Producer):
    """A transactional producer, initialized: the previous owner of its transactional id is fenced, and that owner's
    transaction aborted.

    All methods except `close` raise ProducerFencedError if another producer has taken the id, and otherwise the
    library's errors.
    """

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def send_offsets(self, reader: GroupReader, group: str, positions: Mapping[Partition, int]) -> None:
        """Commit offsets in this transaction: the positions at which the reader's group will continue."""

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...


class Reader(ABC):
    """A consumer of one partition without a group."""

    @abstractmethod
    def read(self, count: int, seconds: float = READ_SECONDS) -> list[tuple[int, Record]]:
        """Return the next `count` records with their offsets, or fewer if none arrives within `seconds`."""

    @abstractmethod
    def seek(self, offset: int) -> None: ...

    @abstractmethod
    def seek_to_beginning(self) -> None: ...

    @abstractmethod
    def seek_to_end(self) -> None: ...

    @abstractmethod
    def bounds(self) -> tuple[int, int]:
        """Return the first offset, and the offset after the last."""

    @abstractmethod
    def offset_at(self, timestamp_ms: int) -> int | None:
        """Return the offset of the first record whose timestamp is at least this one."""

    @abstractmethod
    def close(self) -> None: ...


class Client(ABC):
    """One library against one bootstrap server."""

    assignors: tuple[str, ...]
    """Values that `MemberOptions.assignor` may have."""

    member_class: type[Member]

    commits: tuple[str, ...] = ("auto", "revoke", "each")
    """Values of `MemberOptions.commit` that the library supports."""

    null_headers = True
    """True if the client's producer accepts headers without a value."""

    empty_values = True
    """True if the client's producer distinguishes empty keys and values from null ones."""

    sets_timestamps = True
    changes_topics = True
    deletes_groups = True

    ends_with_topic: str = ""
    """Reason why a member does not survive the deletion of a subscribed topic; empty if it does."""

    drops_when_stopped = False
    """True if a stopped member may lose records it has just read. Such a member is stopped only while no records
    flow."""

    no_admin: str = ""
    """Reason why the library has no admin client, so that another library prepares topics. Empty if it has one."""

    no_upgrade = "it refuses a list of eager and cooperative assignors, so a group cannot be bounced over"
    """Reason why a group cannot change from eager to cooperative without a pause."""

    commit_where_topics_go = "auto"
    """Value of `MemberOptions.commit` for members that lose one of their topics to a deletion."""

    no_transactions: str = ""
    """Reason why the client has no transactions; empty if it has them."""

    lists_stable_offsets = True
    """True if a reader of committed records receives the last stable offset as the end of the log."""

    not_fenced: str = ""
    """Reason why a static member does not notice that another member has taken over its instance id; empty if it does.
    """

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
        """Start a member in a process of its own. `program` is the module of the suite."""
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
        """Return a reader with read_committed. If the group has no offsets, it begins at the start of the log."""
        raise UnsupportedError("no transactions")

    @abstractmethod
    def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Commit offsets without being a member of the group."""

    @abstractmethod
    def committed(self, group: str, topic: str, partition: int) -> int | None: ...

    # --- admin ------------------------------------------------------------------------------------------------

    @abstractmethod
    def create_topic(self, topic: str, partitions: int) -> None: ...

    @abstractmethod
    def delete_topic(self, topic: str) -> None: ...

    @abstractmethod
    def partitions(self, topic: str) -> int | None:
        """Return the number of partitions, or None if there is no such topic."""

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
        """Return the group's state by Kafka's name, and the number of its members."""
        raise UnsupportedError("no DescribeGroups")

    def delete_group(self, group: str) -> None:
        raise UnsupportedError("no DeleteGroups")

    # --- features of a few libraries --------------------------------------------------------------------------

    def leave_versions(self) -> Mapping[int, Mapping[str, Any]]:
        """Return the LeaveGroup versions that the client can send, each with the `MemberOptions.extra` that selects the
        version.
        """
        raise UnsupportedError("it always sends the version it negotiates")

    def raw_group(self, protocol_type: str, protocol: str, metadata: bytes, assignment: bytes) -> bytes:
        """Join as the only member of a group of any protocol type, be its leader, and return the
        answer of SyncGroup.
        """
        raise UnsupportedError("its groups are of protocol type consumer")

    @abstractmethod
    def close(self) -> None:
        """Close connections."""


def wait_until(predicate: Any, what: str, seconds: float = 30.0) -> None:
    """Evaluate the predicate until it is true. Raise AssertionError if that takes longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while not predicate():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.05)
