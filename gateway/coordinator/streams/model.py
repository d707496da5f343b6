"""The vocabulary of the streams group coordinator (KIP-1071): members as values, what they say and are told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ClientRequest
from gateway.coordinator.streams.tasks import NO_TASKS, Task, Tasks
from gateway.coordinator.streams.topology import StatusCode, Topology
from protocol.errors import ErrorCode

JOIN_EPOCH = 0
LEAVE_EPOCH = -1


class MemberState(Enum):
    STABLE = "stable"
    UNREVOKED = "unrevoked_tasks"
    """Has tasks that it is to let go of, and has not said yet that it did."""
    UNRELEASED = "unreleased_tasks"
    """Awaits tasks that somebody else has not let go of."""


@dataclass(frozen=True, slots=True)
class StreamsMember:
    member_id: MemberId
    process_id: str = ""
    """Members of one process share its state directory: no two of them may hold the same task."""
    member_epoch: int = 0
    previous_member_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: Tasks = NO_TASKS
    """What it was told that it may own."""
    pending_revocation: Tasks = NO_TASKS
    """What it was told to let go of, and may own still."""

    @property
    def held(self) -> Tasks:
        return self.assigned | self.pending_revocation


@dataclass(frozen=True, slots=True)
class StreamsGroupHeartbeatReply:
    error: ErrorCode
    message: str | None = None
    member_id: MemberId | None = None
    member_epoch: int = 0
    heartbeat_interval_ms: int = 0
    tasks: Tasks | None = None
    """All that the member may own now; None where it is as it was told before."""
    status: tuple[tuple[StatusCode, str], ...] = ()


@dataclass(frozen=True, slots=True)
class StreamsGroupHeartbeat(ClientRequest[StreamsGroupHeartbeatReply]):
    """A request of that name. None and −1 mean "as before"."""

    connection_number: int
    """Rises with every connection that the node accepts: tells a late request from a new one."""
    client_id: str
    client_host: str
    member_id: MemberId
    member_epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = -1
    topology: Topology | None = None
    active: frozenset[Task] | None = None
    standby: frozenset[Task] | None = None
    warmup: frozenset[Task] | None = None
    process_id: str | None = None
    has_source_patterns: bool = False
    """Its topology reads topics by regular expression."""
    reports_offsets: bool = False
    """It tells how far its tasks have come."""
    shutdown_application: bool = False

    @property
    def owned(self) -> Tasks | None:
        return None if self.active is None or self.standby is None else Tasks(self.active, self.standby)
