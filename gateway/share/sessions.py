"""Share sessions (KIP-932): what each member of a share group reads from this node, from request to request.

The one idea: a session is known by group and member, and each request of it has the next epoch; so a request that was
overtaken, or that comes to a node that knows nothing of it, is told so before it does anything. A session ends with its
connection, and what its member has acquired is let go then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import UUID

from gateway.coordinator.facts import MemberId
from gateway.share.partitions import SharePartitions
from protocol.errors import ErrorCode, KafkaError
from storage.share import ShareKey

INITIAL_EPOCH, FINAL_EPOCH = 0, -1
MAX_EPOCH = 2**31 - 1
MAX_SESSIONS = 2_000
"""Kafka's default of `group.share.max.share.sessions`."""

MAX_SESSION_PARTITIONS = 20_000
MAX_PARTITIONS = 200_000
"""Of all sessions of a node: some 80 MB. To name them costs a client next to nothing. Each is remembered as long as its
session lasts, whether or not there is such a one."""

SessionKey = tuple[str, MemberId]


@dataclass(slots=True)
class ShareSession:
    group_id: str
    member_id: MemberId
    connection_id: str
    epoch: int = 1
    """Of its next request."""
    partitions: dict[tuple[UUID, int], None] = field(default_factory=dict[tuple[UUID, int], None])
    """What it reads, in the order in which it is looked at."""
    unverified: dict[tuple[UUID, int], None] = field(default_factory=dict[tuple[UUID, int], None])
    """What it has begun to read, where the node must ask whether what it remembers is still true."""
    acquired_in: dict[ShareKey, None] = field(default_factory=dict[ShareKey, None])
    """Where its member has acquired something."""
    counted: int = 0
    """How many of both the node counts of it."""
    leaders: tuple[object, ...] = ()
    """By whom each partition was led when what it reads was last found to be true."""
    ended: bool = False
    """Nothing is acquired for it any more: a request that is still under way has nobody to give it to."""

    def key(self, partition: tuple[UUID, int]) -> ShareKey:
        return ShareKey(self.group_id, *partition)

    def advance(self) -> None:
        self.epoch = 1 if self.epoch == MAX_EPOCH else self.epoch + 1

    def led_by(self, *leaders: object) -> None:
        """Where others lead, or have led meanwhile, what this node remembers of any partition may be old. `leaders`: of
        which any is another object then."""
        if leaders != self.leaders:
            self.unverified = dict(self.partitions)
            self.leaders = leaders

    def put_last(self, partition: tuple[UUID, int]) -> None:
        """It has been given records: the others are looked at first the next time."""
        if partition in self.partitions:
            del self.partitions[partition]
            self.partitions[partition] = None


class ShareSessions:
    """Of one node."""

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
        """A new session, and the one that it takes the place of. KafkaError SHARE_SESSION_LIMIT_REACHED."""
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
        """The session that a request with this epoch, not the initial one, goes on with, or ends. Raises KafkaError."""
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
        """The session, which is known here, reads others from now on. KafkaError INVALID_REQUEST where they are too
        many for it, SHARE_SESSION_LIMIT_REACHED where they are for all sessions; then they are as they were."""
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
        """It is known no more; the caller lets go of what its member has acquired."""
        session.ended = True
        if self._sessions.get((session.group_id, session.member_id)) is session:
            del self._sessions[session.group_id, session.member_id]
            self._partition_count -= session.counted
            self._leave(session)

    def connection_closed(self, connection_id: str, partitions: SharePartitions) -> None:
        """Its sessions end, and what their members have acquired is for anyone."""
        for key in list(self._of_connection.get(connection_id, ())):
            session = self._sessions[key]
            self.end(session)
            partitions.release(session.member_id, session.acquired_in)

    def _leave(self, session: ShareSession) -> None:
        held = self._of_connection.get(session.connection_id, {})
        held.pop((session.group_id, session.member_id), None)
        if not held:
            self._of_connection.pop(session.connection_id, None)
