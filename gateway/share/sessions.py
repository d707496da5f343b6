"""Share sessions (KIP-932): what each member of a share group reads from this node, from request to request.

The one idea: group and member identify a session, and each request has the next epoch. So a request that was overtaken,
or that comes to a node that does not know the session, is refused before it has any effect. A session ends with its
connection, and its acquired records are released then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import UUID

from gateway.coordinator.facts import MemberId
from gateway.share.partitions import SharePartitions, ShareWatch
from protocol.errors import ErrorCode, KafkaError
from storage.share import ShareKey

INITIAL_EPOCH, FINAL_EPOCH = 0, -1
MAX_EPOCH = 2**31 - 1
MAX_SESSIONS = 2_000
"""Kafka's default of `group.share.max.share.sessions`."""

MAX_SESSION_PARTITIONS = 20_000
MAX_PARTITIONS = 200_000
"""Partitions of all sessions of a node: some 80 MB. Naming them costs a client next to nothing. Each is remembered
during its session, even if no such partition exists."""

SILENT_S = 2.0
"""Silence of a session after which the node checks its memory again. A member that has been silent for long may have
expired. Then its group may have been empty, and its offsets may have been reset through another node."""

SessionKey = tuple[str, MemberId]


@dataclass(slots=True)
class ShareSession:
    group_id: str
    member_id: MemberId
    connection_id: str
    epoch: int = 1
    """Epoch of the next request."""
    partitions: dict[tuple[UUID, int], None] = field(default_factory=dict[tuple[UUID, int], None])
    """Partitions that the session reads, in the order in which they are examined."""
    unverified: dict[tuple[UUID, int], None] = field(default_factory=dict[tuple[UUID, int], None])
    """New partitions, about which the node must check that its memory is still true."""
    acquired_in: dict[ShareKey, None] = field(default_factory=dict[ShareKey, None])
    """Partitions in which the member has acquired records."""
    counted: int = 0
    """Number of entries in `partitions` and `acquired_in` that the node's bound already counts."""
    leaders: tuple[object, ...] = ()
    """Leader of each partition at the last check of the node's memory of it."""
    checked_s: float = float("-inf")
    """Time of the last request, or of the last look within a request."""
    ended: bool = False
    """True if no more records may be acquired for the session, because a request in progress could not deliver them."""
    waiting: ShareWatch | None = None
    """Watch of the session's only request that may wait for records. Each such request remembers all partitions of the
    session, so that many on as many connections would fill the node."""

    def let_wait(self, watch: ShareWatch | None) -> None:
        """Let the request of this watch wait, and wake the one that waits now, so that it ends."""
        former, self.waiting = self.waiting, watch
        if former is not None:
            former.wake()

    def key(self, partition: tuple[UUID, int]) -> ShareKey:
        return ShareKey(self.group_id, *partition)

    def advance(self) -> None:
        self.epoch = 1 if self.epoch == MAX_EPOCH else self.epoch + 1

    def led_by(self, now_s: float, *leaders: object) -> None:
        """Note at `now_s` what decides about leaders: `leaders`, each of which becomes a new object after a change.
        After a change, or a silence, what this node remembers of any partition may be out of date."""
        if leaders != self.leaders or now_s > self.checked_s + SILENT_S:
            held = {(key.topic_id, key.partition_index): None for key in self.acquired_in}
            self.unverified = {**self.partitions, **held}
            self.leaders = leaders
        self.checked_s = now_s

    def put_last(self, partition: tuple[UUID, int]) -> None:
        """Move the partition to the end, because it yielded records. The next request examines the others first."""
        if partition in self.partitions:
            del self.partitions[partition]
            self.partitions[partition] = None


class ShareSessions:
    """The share sessions of one node."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, max_partitions: int = MAX_PARTITIONS) -> None:
        self.max_sessions = max_sessions
        self.max_partitions = max_partitions
        self._partition_count = 0
        self._sessions: dict[SessionKey, ShareSession] = {}
        self._of_connection: dict[str, dict[SessionKey, None]] = {}

    @property
    def count(self) -> int:
        return len(self._sessions)

    def open(self, group_id: str, member_id: MemberId, connection_id: str) -> tuple[ShareSession, ShareSession | None]:
        """Return a new session, and the one that it replaces. Raise KafkaError SHARE_SESSION_LIMIT_REACHED."""
        former = self._sessions.get((group_id, member_id))
        if former is None and len(self._sessions) >= self.max_sessions:
            raise KafkaError(ErrorCode.SHARE_SESSION_LIMIT_REACHED, f"there are {self.max_sessions} share sessions")
        if former is not None:
            self.end(former)
        session = ShareSession(group_id, member_id, connection_id)
        self._sessions[group_id, member_id] = session
        self._of_connection.setdefault(connection_id, {})[group_id, member_id] = None
        return session, former

    def get(self, group_id: str, member_id: MemberId, epoch: int, connection_id: str) -> ShareSession:
        """Return the session that a request with this later epoch continues or ends. Raise KafkaError."""
        session = self._sessions.get((group_id, member_id))
        if session is None:
            raise KafkaError(ErrorCode.SHARE_SESSION_NOT_FOUND, f"member {member_id} has no share session here")
        if epoch not in (FINAL_EPOCH, session.epoch):
            raise KafkaError(ErrorCode.INVALID_SHARE_SESSION_EPOCH, f"the next epoch is {session.epoch}, not {epoch}")
        if session.connection_id != connection_id:
            self._leave(session)
            session.connection_id = connection_id
            self._of_connection.setdefault(connection_id, {})[group_id, member_id] = None
        if epoch != FINAL_EPOCH:
            session.advance()
        return session

    def read(
        self, session: ShareSession, added: Iterable[tuple[UUID, int]], forgotten: Iterable[tuple[UUID, int]]
    ) -> None:
        """Add and remove partitions of a session. Raise KafkaError INVALID_REQUEST if the session would have too many,
        SHARE_SESSION_LIMIT_REACHED if all sessions together would. Then the session keeps its partitions."""
        added, forgotten = dict.fromkeys(added), list(forgotten)
        if added.keys() <= session.partitions.keys() and not forgotten:
            return
        partitions = {**session.partitions, **added}
        for partition in forgotten:
            partitions.pop(partition, None)
        if len(partitions) > MAX_SESSION_PARTITIONS:
            raise KafkaError(
                ErrorCode.INVALID_REQUEST, f"a share session has at most {MAX_SESSION_PARTITIONS} partitions"
            )
        more = len(partitions) + len(session.acquired_in) - session.counted
        if more > 0 and self._partition_count + more > self.max_partitions:
            raise KafkaError(
                ErrorCode.SHARE_SESSION_LIMIT_REACHED,
                f"all share sessions have at most {self.max_partitions} partitions",
            )
        self._partition_count += more
        session.counted += more
        session.unverified.update((partition, None) for partition in partitions if partition not in session.partitions)
        session.partitions = partitions

    def end(self, session: ShareSession) -> None:
        """Forget the session; the caller releases what its member has acquired."""
        session.ended = True
        session.let_wait(None)
        if self._sessions.get((session.group_id, session.member_id)) is session:
            del self._sessions[session.group_id, session.member_id]
            self._partition_count -= session.counted
            self._leave(session)

    def connection_closed(self, connection_id: str, partitions: SharePartitions) -> None:
        """End the sessions of the connection, and release the records that their members have acquired."""
        for key in list(self._of_connection.get(connection_id, ())):
            session = self._sessions[key]
            self.end(session)
            partitions.release(session.member_id, session.acquired_in)

    def _leave(self, session: ShareSession) -> None:
        held = self._of_connection.get(session.connection_id, {})
        held.pop((session.group_id, session.member_id), None)
        if not held:
            self._of_connection.pop(session.connection_id, None)
