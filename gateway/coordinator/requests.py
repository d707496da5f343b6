"""Requests that more than one machine answers, and their replies.

The one idea: these are values without behaviour. A consumer group may have members of the classic protocol, and every
group may be asked for its offsets or deleted, so these requests belong to no machine. Each request gets exactly one
reply, in its step or in a later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from gateway.coordinator.facts import MemberId
from gateway.coordinator.handoff import Drained
from gateway.coordinator.machine import ClientRequest, News, Request
from protocol.errors import ErrorCode

Protocols = tuple[tuple[str, bytes], ...]
"""Protocols in the member's order of preference: (name, metadata)."""


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
    by_member_epoch: bool = False
    """True if the epoch of the named member fences the commit, not the group's generation."""
    by_producer: bool = False
    """True if neither fences the commit: it names no member, and its transaction's producer is checked instead."""
    stale: ErrorCode = ErrorCode.STALE_MEMBER_EPOCH
    """Return the error for a member whose stored epoch differs."""
    member_epoch: int | None = None
    """Epoch by which Postgres fences the commit, if it may be newer than the epoch in the request; None: the request's
    epoch."""


@dataclass(frozen=True, slots=True)
class DeleteReply:
    error: ErrorCode


# --- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinGroup(ClientRequest[JoinReply]):
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
    """An id that cannot be guessed, used if this request makes a new member. The coordinator has no randomness of
    its own."""
    reason: str | None = None
    connection_number: int = -1
    """Rises with every connection that the node accepts, which separates a late request from a new one."""


@dataclass(frozen=True, slots=True)
class SyncGroup(ClientRequest[SyncReply]):
    member_id: MemberId
    group_instance_id: str | None
    generation_id: int
    protocol_type: str | None
    protocol_name: str | None
    assignments: tuple[tuple[MemberId, bytes], ...]


@dataclass(frozen=True, slots=True)
class Heartbeat(ClientRequest[HeartbeatReply]):
    member_id: MemberId
    group_instance_id: str | None
    generation_id: int


@dataclass(frozen=True, slots=True)
class LeavingMember:
    member_id: MemberId
    group_instance_id: str | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class LeaveGroup(ClientRequest[LeaveReply]):
    members: tuple[LeavingMember, ...]


@dataclass(frozen=True, slots=True)
class OffsetCommit(ClientRequest[OffsetCommitReply]):
    """Asks whether a commit may go to Postgres, which fences the generation once more."""

    version: int
    member_id: MemberId
    group_instance_id: str | None
    generation_id: int
    """Generation, or the member's epoch."""
    partitions: tuple[tuple[UUID, int], ...] = ()
    """(topic id, partition) of each offset to commit."""


@dataclass(frozen=True, slots=True)
class TxnOffsetCommit(ClientRequest[OffsetCommitReply]):
    """Asks the same for a commit that takes effect with a producer's transaction."""

    member_id: MemberId
    group_instance_id: str | None
    generation_id: int
    """Generation, or the member's epoch."""
    partitions: tuple[tuple[UUID, int], ...] = ()
    """(topic id, partition) of each offset to commit."""

    @property
    def names_nobody(self) -> bool:
        """True if the request names neither a member nor a generation. Only the producer is responsible for it, as
        before version 3."""
        return self.generation_id < 0 and not self.member_id and self.group_instance_id is None


@dataclass(frozen=True, slots=True)
class DeleteGroup(Request[DeleteReply]):
    """Removes the group if it is Empty."""


@dataclass(frozen=True, slots=True)
class HandoffProgress(News):
    """How far the previous owners of handoffs have committed. This is determined outside the group, so it may be
    late. Every machine with handoffs accepts it."""

    found: tuple[Drained, ...] = ()
    passed: tuple[tuple[MemberId, str, int], ...] = ()
    """(target, topic, partition): a target that has fetched a committed offset before it was settled, and continues
    from it.
    """
