"""The vocabulary of the share group coordinator (KIP-932): the group as a value, its events, its replies.

The one idea: a share group is a consumer group (KIP-848) without reconciliation. Several members may read a partition
at once. So a member gets its target at once, and its epoch is the target's as soon as it has sent a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from uuid import UUID

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.partitions import Partitions, nothing
from gateway.coordinator.consumer.sessions import Deadlines, no_deadlines
from gateway.coordinator.document import VOLATILE
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ClientRequest, Request
from protocol.errors import ErrorCode

SIMPLE = "simple"
"""The name of the only assignor of share groups."""


class ShareGroupState(Enum):
    """States of a share group, with upstream's names."""

    EMPTY = "Empty"
    STABLE = "Stable"


@dataclass(frozen=True, slots=True)
class ShareMember:
    member_id: MemberId
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    subscribed_topic_names: tuple[str, ...] = ()
    """Sorted, without duplicates."""
    member_epoch: int = 0
    previous_member_epoch: int = 0
    assigned: Partitions = field(default_factory=nothing)
    """Partitions that the coordinator has assigned to the member."""


@dataclass(frozen=True, slots=True)
class ShareMemberRow:
    """Stored row of one member."""

    member: ShareMember
    target: Partitions


@dataclass(frozen=True, slots=True)
class ShareGroupHeartbeatReply:
    error: ErrorCode
    message: str | None = None
    member_id: MemberId | None = None
    member_epoch: int = 0
    heartbeat_interval_ms: int = 0
    assignment: Partitions | None = None
    """All partitions that the member may read. None if they are the same as in the last reply that listed them."""


@dataclass(frozen=True, slots=True)
class ShareGroupHeartbeat(ClientRequest[ShareGroupHeartbeatReply]):
    """A ShareGroupHeartbeat request. None means "as before"."""

    client_id: str
    client_host: str
    member_id: MemberId
    member_epoch: int
    rack_id: str | None = None
    subscribed_topic_names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ShareGroupBegun:
    error: ErrorCode


@dataclass(frozen=True, slots=True)
class BeginShareGroup(Request[ShareGroupBegun]):
    """Creates the share group although no member has joined it, because a request sets its offsets."""


@dataclass(frozen=True, slots=True)
class ShareGroup:
    """One share group at one moment. No mapping is ever mutated.

    Members, targets and epochs are stored. Deadlines start anew when a coordinator reads the group back.
    """

    group_id: str = field(metadata=VOLATILE)
    exists: bool = field(default=False, metadata=VOLATILE)
    is_deleted: bool = field(default=False, metadata=VOLATILE)
    group_epoch: int = 0
    assignment_epoch: int = 0
    metadata_hash: int = 0
    """Hash of the subscribed topics when the group epoch was last decided."""
    topics_revision: int = 0
    """Revision of the topics that the target was computed from. A coordinator that knows only older topics must not
    decide."""
    begun: Mapping[UUID, int] = field(default_factory=dict[UUID, int])
    """Topic → number of its partitions that the group has read at some time, for topics that exist."""
    members: Mapping[MemberId, ShareMember] = field(default_factory=dict[MemberId, ShareMember], metadata=VOLATILE)
    target: Mapping[MemberId, Partitions] = field(default_factory=dict[MemberId, Partitions], metadata=VOLATILE)
    seen: Cluster | None = field(default=None, compare=False, repr=False, metadata=VOLATILE)
    """The topics that `metadata_hash` was last compared with; None before the first comparison."""
    unheard: frozenset[MemberId] = field(default=frozenset(), metadata=VOLATILE)
    """Members that have sent no request since a coordinator took the group over."""
    session_deadlines: Deadlines = field(default_factory=no_deadlines, metadata=VOLATILE)


def state_of(group: ShareGroup) -> ShareGroupState:
    return ShareGroupState.STABLE if group.members else ShareGroupState.EMPTY
