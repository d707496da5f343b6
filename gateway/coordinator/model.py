"""The vocabulary of the classic group coordinator: the group as a value, the events it takes, the replies it gives.

The one idea: nothing here does anything. `classic.step(group, event, now_ms, settings)` reads a `Group` and an event
and returns a `Step`; the runner (`gateway/groups/runtime.py`) stores what changed, then sends the replies. There are no
futures, sockets or clocks: a parked request is its `request_id`, a timer is a deadline in ms on the runner's monotonic
clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from protocol.errors import ErrorCode

RequestId = NewType("RequestId", int)
"""Names one request that awaits exactly one reply; the runner's key to the connection that sent it."""

ConnectionId = NewType("ConnectionId", str)
MemberId = NewType("MemberId", str)

Protocols = tuple[tuple[str, bytes], ...]
"""Protocols in the member's order of preference: (name, metadata)."""


class GroupState(Enum):
    """Rendered names are upstream's, as DescribeGroups and ListGroups show them."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


LEGAL_TRANSITIONS: Mapping[GroupState, frozenset[GroupState]] = {
    GroupState.EMPTY: frozenset({GroupState.PREPARING_REBALANCE, GroupState.DEAD}),
    GroupState.PREPARING_REBALANCE: frozenset({GroupState.COMPLETING_REBALANCE, GroupState.EMPTY, GroupState.DEAD}),
    GroupState.COMPLETING_REBALANCE: frozenset({GroupState.STABLE, GroupState.PREPARING_REBALANCE, GroupState.DEAD}),
    GroupState.STABLE: frozenset({GroupState.PREPARING_REBALANCE, GroupState.DEAD}),
    GroupState.DEAD: frozenset(),
}
"""Where each state may lead (upstream's ClassicGroupState, read the other way round)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Broker settings that the coordinator reads; names and defaults are Kafka's except the last."""

    group_initial_rebalance_delay_ms: int = 3000
    group_min_session_timeout_ms: int = 6000
    group_max_session_timeout_ms: int = 1_800_000
    group_max_size: int = 2**31 - 1
    new_member_join_timeout_ms: int = 300_000
    """How long a member that awaits its first join answer is kept (5 min, fixed in upstream)."""
    group_connection_grace_ms: int = 10_000
    """How long a dynamic member outlives a connection its peer closed; −1 = only the session timeout counts."""


@dataclass(frozen=True, slots=True)
class Parked:
    """A held request, and the connection on which alone it can be answered."""

    request_id: RequestId
    connection_id: ConnectionId


@dataclass(frozen=True, slots=True)
class Member:
    member_id: MemberId
    group_instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: Protocols
    assignment: bytes = b""
    """What the leader gave it in the group's current generation; b"" until the leader has spoken."""
    is_new: bool = False
    """Awaits its first join answer; while that join is held, the session timer is the new-member timeout."""
    parked_join: Parked | None = None
    parked_sync: Parked | None = None
    connection_id: ConnectionId | None = None
    """The connection that last spoke for this member; None after a restart or once it has closed."""


@dataclass(frozen=True, slots=True)
class PendingMember:
    """An id handed out with MEMBER_ID_REQUIRED (KIP-394) that has not joined yet."""

    member_id: MemberId
    connection_id: ConnectionId
    deadline_ms: int


# --- events: each that carries a request_id gets exactly one reply, now or in a later step -------------------------


@dataclass(frozen=True, slots=True)
class JoinGroup:
    request_id: RequestId
    connection_id: ConnectionId
    version: int
    """Request version: >= 4 requires a known member id (KIP-394), >= 9 understands skip_assignment (KIP-814)."""
    client_id: str
    client_host: str
    member_id: MemberId
    group_instance_id: str | None
    protocol_type: str
    protocols: Protocols
    session_timeout_ms: int
    rebalance_timeout_ms: int
    new_member_id: MemberId
    """An unguessable id, taken if this request makes a new member (the coordinator has no randomness of its own)."""
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class SyncGroup:
    request_id: RequestId
    connection_id: ConnectionId
    member_id: MemberId
    group_instance_id: str | None
    generation_id: int
    protocol_type: str | None
    protocol_name: str | None
    assignments: tuple[tuple[MemberId, bytes], ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    request_id: RequestId
    connection_id: ConnectionId
    member_id: MemberId
    group_instance_id: str | None
    generation_id: int


@dataclass(frozen=True, slots=True)
class LeavingMember:
    member_id: MemberId
    group_instance_id: str | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    request_id: RequestId
    connection_id: ConnectionId
    members: tuple[LeavingMember, ...]


@dataclass(frozen=True, slots=True)
class OffsetCommit:
    """Asks whether a commit may go to Postgres; the generation is fenced there once more."""

    request_id: RequestId
    connection_id: ConnectionId
    version: int
    member_id: MemberId
    group_instance_id: str | None
    generation_id: int


@dataclass(frozen=True, slots=True)
class DeleteGroup:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The peer closed (or lost) a connection; its parked requests can no longer be answered."""

    connection_id: ConnectionId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: due deadlines fire. Sent at `next_deadline(group)` or later; late ones are harmless."""


Event = JoinGroup | SyncGroup | Heartbeat | LeaveGroup | OffsetCommit | DeleteGroup | ConnectionClosed | Tick


# --- replies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinedMember:
    member_id: MemberId
    group_instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True)
class JoinReply:
    error: ErrorCode
    member_id: MemberId
    generation_id: int = -1
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str = ""
    skip_assignment: bool = False
    members: tuple[JoinedMember, ...] = ()


@dataclass(frozen=True, slots=True)
class SyncReply:
    error: ErrorCode
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = b""


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    error: ErrorCode


@dataclass(frozen=True, slots=True)
class LeftMember:
    member_id: MemberId
    group_instance_id: str | None
    error: ErrorCode


@dataclass(frozen=True, slots=True)
class LeaveReply:
    error: ErrorCode
    members: tuple[LeftMember, ...] = ()


@dataclass(frozen=True, slots=True)
class OffsetCommitReply:
    error: ErrorCode


@dataclass(frozen=True, slots=True)
class DeleteReply:
    error: ErrorCode


Reply = JoinReply | SyncReply | HeartbeatReply | LeaveReply | OffsetCommitReply | DeleteReply


@dataclass(frozen=True, slots=True)
class Group:
    """One classic group at one moment. A missing group is `Group(group_id)`: Empty, generation 0, never stored.

    Deadlines live here as plain numbers: `session_deadlines` per member, `phase_deadline_ms` for the one timer that
    the state allows (initial delay, join phase, pending sync), pending members' own. No mapping is ever mutated.
    """

    group_id: str
    state: GroupState = GroupState.EMPTY
    exists: bool = False
    """False until the first join, commit or stored record: an id that nobody has used."""
    protocol_type: str | None = None
    protocol_name: str | None = None
    """The vote's winner of the current generation; None while the group is Empty."""
    generation_id: int = 0
    leader_id: MemberId | None = None
    members: Mapping[MemberId, Member] = field(default_factory=dict[MemberId, Member])
    """In the order of joining."""
    pending: Mapping[MemberId, PendingMember] = field(default_factory=dict[MemberId, PendingMember])
    pending_sync: frozenset[MemberId] = frozenset()
    """Members whose SyncGroup this generation still awaits; whoever stays here until the phase deadline is removed."""
    session_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int])
    """A member without one has a parked request, which is sign of life enough."""
    connection_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int])
    """Members whose connection has closed, and when the grace ends."""
    phase_deadline_ms: int | None = None
    initial_delay_remaining_ms: int | None = None
    """Not None while the initial rebalance delay runs: what is left of the rebalance timeout for extensions."""
    new_member_added: bool = False
    """A member was added since the initial delay was last extended."""
    subscribed_topics: frozenset[str] | None = None
    """Topics of all members' subscriptions; None where they cannot be known (other protocol types, malformed)."""
    awaiting_join: int = 0
    """How many members have a parked join. Follows from `members`; kept so that a join need not count them."""
    protocol_support: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many members list each protocol. Follows from `members`; kept so that a join need not ask them all."""

    def with_session_deadline(self, member_id: MemberId, deadline_ms: int) -> Group:
        """The same group with one session deadline moved.

        Written out because heartbeats are all that is frequent here, and `dataclasses.replace` costs three times this.
        """
        session_deadlines = dict(self.session_deadlines)
        session_deadlines[member_id] = deadline_ms
        return Group(
            self.group_id,
            self.state,
            self.exists,
            self.protocol_type,
            self.protocol_name,
            self.generation_id,
            self.leader_id,
            self.members,
            self.pending,
            self.pending_sync,
            session_deadlines,
            self.connection_deadlines,
            self.phase_deadline_ms,
            self.initial_delay_remaining_ms,
            self.new_member_added,
            self.subscribed_topics,
            self.awaiting_join,
            self.protocol_support,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """What one event did. If `persist`, the group must be stored before any reply is sent; if storing fails the
    runner keeps the group it had, so a refused step has changed nothing. A group that is Dead is to be deleted."""

    group: Group
    replies: tuple[tuple[RequestId, Reply], ...] = ()
    persist: bool = False
    reasons: tuple[str, ...] = ()
    """Why the group moved, in words for logs and metrics, e.g. "member m1 left", "rebalance: new member m2"."""
