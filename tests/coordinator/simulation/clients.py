"""Consumers like stock clients: they join, sync and heartbeat, and start over at the step that each error requires.

A client believes only answers on its current connection. It does not know the coordinator; the referee judges what the
answers may be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

from gateway.coordinator.classic.model import Event
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import Reply, RequestId
from gateway.coordinator.requests import (
    Heartbeat,
    HeartbeatReply,
    JoinedMember,
    JoinGroup,
    JoinReply,
    LeaveGroup,
    LeavingMember,
    OffsetCommit,
    OffsetCommitReply,
    Protocols,
    SyncGroup,
    SyncReply,
)
from protocol.consumer import Subscription, TopicPartition, encode_subscription
from protocol.errors import ErrorCode

from .assignor import CONSUMER, assign, read
from .world import Connection, World, member_id, request_id

NO_ID = MemberId("")
ASK_AGAIN = {
    ErrorCode.REBALANCE_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.ILLEGAL_GENERATION,
}
FATAL = {
    ErrorCode.FENCED_INSTANCE_ID,
    ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
    ErrorCode.GROUP_MAX_SIZE_REACHED,
}


class Phase(Enum):
    JOINING = auto()
    SYNCING = auto()
    STABLE = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True)
class Character:
    """Configuration of a client."""

    instance_id: str | None
    join_version: int
    protocol_type: str
    protocol_names: tuple[str, ...]
    session_timeout_ms: int
    rebalance_timeout_ms: int
    cooperative: bool
    """After an assignment that changed its partitions, the client joins again, with its partitions in its metadata."""
    claims: bool = False
    """The client keeps and claims its partitions while it joins, and joins again after it has
    released some (KIP-429).
    """
    claims_last_generation: bool = False
    """True if a claim names the generation that the member joined last (Java). False if it names the generation that
    assigned its partitions (librdkafka).
    """


class Client:
    def __init__(self, world: World, name: str, character: Character) -> None:
        self.name = name
        self.character = character
        self.member_id = NO_ID
        self.generation_id = -1
        self.phase = Phase.JOINING
        self.partitions: tuple[int, ...] = ()
        self.sent: list[Event] = []
        """The last few requests. A disturbance can send one of them again."""
        self._world = world
        self.owned: frozenset[int] = frozenset()
        """Partitions that the client claims, if it `claims` any."""
        self.reading: frozenset[int] = frozenset()
        """The owned partitions that the client reads. The committed offsets of the other owned partitions are not
        stable yet.
        """
        self._owned_generation_id = -1
        self._announced: tuple[int, ...] = ()
        self._topics: tuple[str, ...] = ("t",)
        self._protocol_name: str | None = None
        self._waiting: RequestId | None = None
        self._life = 0
        """Number of times the client has restarted. An action that was planned before a restart is skipped."""
        self._connection = self._connect()

    @property
    def alive(self) -> bool:
        return self.phase is not Phase.GONE

    # --- connection ---------------------------------------------------------------------------------------------------

    def _connect(self) -> Connection:
        return Connection(self._world, self.name, self._receive, self._lost)

    def _lost(self) -> None:
        """Handle a broken connection. Its pending requests may or may not have been processed."""
        if not self.alive:
            return
        self._connection = self._connect()
        self._life += 1
        if self.phase is Phase.STABLE:
            self._plan(self._world.pause_ms(500), self._heartbeat)
        else:
            self._plan(self._world.pause_ms(500), self.join)

    def reconnect(self) -> None:
        """Open a new connection. The server may consider the old connection open for a while."""
        self._connection.close()
        self._lost()

    def _send(self, event: Event) -> None:
        self.sent = [*self.sent[-5:], event]
        self._connection.send(event)

    def _plan(self, delay_ms: int, action: Callable[[], None]) -> None:
        life = self._life

        def act() -> None:
            if self._life == life and self.alive:
                action()

        self._world.after(delay_ms, act)

    def _await(self, event: JoinGroup | SyncGroup, patience_ms: int) -> None:
        self._waiting = event.request_id

        def give_up() -> None:
            if self._waiting == event.request_id:
                self.reconnect()

        self._plan(patience_ms, give_up)

    # --- requests -----------------------------------------------------------------------------------------------------

    def join(self) -> None:
        self._join(self._offer())

    def _join(self, offer: Protocols) -> None:
        self._life += 1
        self.phase = Phase.JOINING
        character = self.character
        event = JoinGroup(
            request_id(self._world),
            self._connection.connection_id,
            character.join_version,
            "everyone",
            "/127.0.0.1",
            self.member_id,
            character.instance_id,
            character.protocol_type,
            offer,
            character.session_timeout_ms,
            character.rebalance_timeout_ms,
            member_id(self._world, self.name),
        )
        self._send(event)
        self._await(event, character.rebalance_timeout_ms + 10_000)

    def _offer(self) -> Protocols:
        return tuple((name, self._metadata(name)) for name in self.character.protocol_names)

    def _metadata(self, protocol_name: str) -> bytes:
        owned = repr((protocol_name, self._announced if self.character.cooperative else ())).encode()
        if self.character.claims:
            partitions = (TopicPartition("t", tuple(sorted(self.owned))),) if self.owned else ()
            last = self.character.claims_last_generation
            generation_id = self.generation_id if last else self._owned_generation_id
            return encode_subscription(Subscription(3, self._topics, owned, partitions, generation_id))
        if self.character.protocol_type == CONSUMER:
            return encode_subscription(Subscription(1, self._topics, owned))
        return repr(self._topics).encode() + owned

    def change_topics(self) -> None:
        if self.phase is Phase.STABLE:
            self._topics = ("t", f"u{self._world.number()}")
            self.join()

    def join_with_foreign_protocols(self) -> None:
        """Send a rejoin with protocols that the group lacks. It must be refused and must leave the member unchanged."""
        if self.phase is Phase.STABLE:
            self._join((("alien", b""),))

    def _sync(self, assignments: dict[MemberId, bytes]) -> None:
        self.phase = Phase.SYNCING
        told = self._world.chance(0.5)
        event = SyncGroup(
            request_id(self._world),
            self._connection.connection_id,
            self.member_id,
            self.character.instance_id,
            self.generation_id,
            self.character.protocol_type if told else None,
            self._protocol_name if told else None,
            tuple(assignments.items()),
        )
        self._send(event)
        self._await(event, self._world.random.choice((8_000, 30_000)))

    def _heartbeat(self) -> None:
        if self.phase is not Phase.STABLE:
            return
        self._send(
            Heartbeat(
                request_id(self._world),
                self._connection.connection_id,
                self.member_id,
                self.character.instance_id,
                self.generation_id,
            )
        )
        self._plan(self.character.session_timeout_ms // 3 + self._world.pause_ms(100), self._heartbeat)

    def commit(self) -> None:
        self._send(
            OffsetCommit(
                request_id(self._world),
                self._connection.connection_id,
                8,
                self.member_id,
                self.character.instance_id,
                self.generation_id,
            )
        )

    def leave(self) -> None:
        leaving = LeavingMember(self.member_id, self.character.instance_id)
        self._send(LeaveGroup(request_id(self._world), self._connection.connection_id, (leaving,)))
        self.phase = Phase.GONE
        self._world.after(1_000, self._connection.close)

    def die(self) -> None:
        self.phase = Phase.GONE
        self._connection.close()

    def ask_twice(self) -> None:
        """Repeat the pending request on a new connection while the old one is still open."""
        if self._waiting is None or not self.sent or not isinstance(self.sent[-1], JoinGroup | SyncGroup):
            return
        self._world.after(self._world.random.randint(0, 5_000), self._connection.close)
        self._connection = self._connect()
        event = replace(
            self.sent[-1],
            request_id=request_id(self._world),
            connection_id=self._connection.connection_id,
            **({"new_member_id": member_id(self._world, self.name)} if isinstance(self.sent[-1], JoinGroup) else {}),
        )
        self._life += 1
        self._send(event)
        self._await(event, 30_000)

    # --- replies ------------------------------------------------------------------------------------------------------

    def _receive(self, connection: Connection, event: Event, reply: Reply) -> None:
        if connection is not self._connection or not self.alive:
            return
        match reply:
            case JoinReply() if event.request_id == self._waiting:  # type: ignore[union-attr]
                self._waiting = None
                self._life += 1
                self._joined(event, reply)
            case SyncReply() if event.request_id == self._waiting:  # type: ignore[union-attr]
                self._waiting = None
                self._life += 1
                self._synced(reply)
            case HeartbeatReply() | OffsetCommitReply() if self.phase is Phase.STABLE:
                self._beaten(event, reply)
            case _:
                pass

    def _joined(self, event: Event, reply: JoinReply) -> None:
        assert isinstance(event, JoinGroup)
        match reply.error:
            case ErrorCode.NONE:
                self.member_id = reply.member_id
                self.generation_id = reply.generation_id
                self._protocol_name = reply.protocol_name
                assignments = self._assign(reply.members) if reply.members and not reply.skip_assignment else {}
                self._plan(self._world.pause_ms(), lambda: self._sync(assignments))
            case ErrorCode.MEMBER_ID_REQUIRED:
                self.member_id = reply.member_id
                self._plan(self._world.pause_ms(), self.join)
            case ErrorCode.INCONSISTENT_GROUP_PROTOCOL if event.protocols[0][0] == "alien":
                self.phase = Phase.STABLE
                self._plan(0, self._heartbeat)
            case error:
                self._start_over(error)

    def _assign(self, members: tuple[JoinedMember, ...]) -> dict[MemberId, bytes]:
        return assign(members, self.generation_id, self.character.protocol_type)

    def _synced(self, reply: SyncReply) -> None:
        if reply.error is not ErrorCode.NONE:
            self._start_over(reply.error)
            return
        assigned = read(reply.assignment, self.character.protocol_type)
        self.partitions = assigned[2] if assigned is not None else ()
        self.phase = Phase.STABLE
        if self.character.claims:
            self._take(frozenset(self.partitions))
        self._plan(self._world.random.randint(0, 2_000), self._heartbeat)
        if self.character.cooperative and self.partitions != self._announced:
            self._announced = self.partitions
            self._plan(self._world.pause_ms(), self.join)

    def _take(self, assigned: frozenset[int]) -> None:
        """Take over an assignment. Read revoked partitions until the application has released them. Then report the
        release by a rejoin.
        """
        let_go = self.owned - assigned
        self.owned |= assigned
        self._owned_generation_id = self.generation_id
        self._read()

        def revoke() -> None:
            self.owned -= let_go
            self.reading &= self.owned
            self.join()

        if let_go:
            self._plan(self._world.pause_ms(500), revoke)

    def _read(self) -> None:
        """Fetch the committed offsets of the assigned partitions until all of them are settled."""
        if not self.alive or not self.owned - self.reading:
            return
        unsettled = self._world.server.unsettled_for(self._connection.connection_id)
        if unsettled is not None and self.owned - self.reading - unsettled:
            self.reading = self.owned - (unsettled - self.reading)
            self._world.owns(self)
        if self.owned - self.reading:
            self._world.after(100, self._read)

    def _beaten(self, event: Event, reply: HeartbeatReply | OffsetCommitReply) -> None:
        """Handle the answer to a heartbeat. Only an answer for the current generation counts."""
        if reply.error is ErrorCode.NONE or event.generation_id != self.generation_id:  # type: ignore[union-attr]
            return
        if isinstance(reply, OffsetCommitReply) and reply.error is ErrorCode.REBALANCE_IN_PROGRESS:
            return
        if reply.error in (ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR):
            return
        self._start_over(reply.error)

    def _start_over(self, error: ErrorCode) -> None:
        if error in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION):
            # The member has lost its partitions.
            self.owned = self.reading = frozenset()
            self._owned_generation_id = self.generation_id = -1
        if error is ErrorCode.UNKNOWN_MEMBER_ID:
            self.member_id = NO_ID
            self.generation_id = -1
            self._plan(self._world.pause_ms(), self.join)
        elif error in ASK_AGAIN:
            self._plan(self._world.pause_ms() + 50, self.join)
        else:
            assert error in FATAL, error
            self.die()
