"""The vocabulary of the streams group coordinator (KIP-1071): the group as a value, its events, its replies.

The one idea: a streams group is a consumer group (KIP-848) whose members own tasks instead of partitions. What tasks
there are follows from a topology, which the first member brings, and from the topics that it reads; while these do not
fit, nobody owns anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.sessions import Deadlines, no_deadlines
from gateway.coordinator.document import VOLATILE
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ClientRequest
from gateway.coordinator.streams.tasks import NO_TASKS, Task, Tasks
from gateway.coordinator.streams.topology import Configured, StatusCode, TopicInfo, Topology
from protocol.errors import ErrorCode

NO_TOPOLOGY = -1


class StreamsGroupState(Enum):
    """Rendered as upstream does."""

    EMPTY = "Empty"
    NOT_READY = "NotReady"
    """The topology's topics do not fit."""
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"


class MemberState(Enum):
    STABLE = "stable"
    UNREVOKED = "unrevoked_tasks"
    """Has tasks that it is to let go of, and has not said yet that it did."""
    UNRELEASED = "unreleased_tasks"
    """Awaits tasks that somebody else has not let go of."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an instance answers queries of its state (Interactive Queries)."""

    host: str
    port: int


class EndpointPartitions(NamedTuple):
    """What the member behind an endpoint reads: topic → partitions."""

    endpoint: Endpoint
    active: Mapping[str, frozenset[int]]
    standby: Mapping[str, frozenset[int]]


@dataclass(frozen=True, slots=True)
class StreamsMember:
    member_id: MemberId
    process_id: str = ""
    """Members of one process share its state directory: no two of them may hold the same task."""
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    """How long it may take to let go of tasks."""
    topology_epoch: int = NO_TOPOLOGY
    user_endpoint: Endpoint | None = None
    client_tags: tuple[tuple[str, str], ...] = ()
    """Sorted."""
    member_epoch: int = 0
    previous_member_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: Tasks = NO_TASKS
    """What it was told that it may own."""
    pending_revocation: Tasks = NO_TASKS
    """What it was told to let go of, and may own still."""
    active_since: tuple[tuple[int, frozenset[Task]], ...] = ()
    """(epoch, the active tasks that it was given at that epoch) of all that it holds: whose offsets it may commit at an
    older epoch than its own (`offsets.py`)."""
    connection_number: int = field(default=-1, metadata=VOLATILE)
    """Of the connection that it last spoke by."""

    @property
    def process(self) -> str:
        """One that has not said which is alone in its own."""
        return self.process_id or self.member_id

    @property
    def held(self) -> Tasks:
        return self.assigned | self.pending_revocation


@dataclass(frozen=True, slots=True)
class StreamsMemberRow:
    """What is stored of one member."""

    member: StreamsMember
    target: Tasks


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
    missing_internal_topics: tuple[TopicInfo, ...] = ()
    """To be created, each with its number of partitions."""
    endpoint_information_epoch: int = 0
    partitions_by_user_endpoint: tuple[EndpointPartitions, ...] | None = None
    """None where the member knows the group's endpoints already."""


@dataclass(frozen=True, slots=True)
class StreamsGroupHeartbeat(ClientRequest[StreamsGroupHeartbeatReply]):
    """A request of that name. None and −1 mean "as before"."""

    connection_number: int
    """Rises with every connection that the node accepts: tells a late request from a new one."""
    client_id: str
    client_host: str
    member_id: MemberId
    member_epoch: int
    endpoint_information_epoch: int = 0
    """Of the endpoints that the member knows."""
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = -1
    topology: Topology | None = None
    active: frozenset[Task] | None = None
    standby: frozenset[Task] | None = None
    warmup: frozenset[Task] | None = None
    process_id: str | None = None
    user_endpoint: Endpoint | None = None
    client_tags: tuple[tuple[str, str], ...] | None = None
    has_source_patterns: bool = False
    """Its topology reads topics by regular expression."""
    """It tells how far its tasks have come."""
    shutdown_application: bool = False

    @property
    def owned(self) -> Tasks | None:
        return None if self.active is None or self.standby is None else Tasks(self.active, self.standby)


@dataclass(frozen=True, slots=True)
class StreamsGroup:
    """One streams group at one moment. No mapping is ever mutated.

    Members, targets, epochs and the topology are what is stored; deadlines begin anew where the group is read back.
    """

    group_id: str = field(metadata=VOLATILE)
    exists: bool = field(default=False, metadata=VOLATILE)
    is_deleted: bool = field(default=False, metadata=VOLATILE)
    group_epoch: int = 0
    assignment_epoch: int = 0
    topology: Topology | None = None
    """The first member's; kept until another takes its place in a group without members."""
    is_ready: bool = False
    """Whether topics fit the topology, as they were when the group epoch was last decided."""
    metadata_hash: int = 0
    """Of the topology's topics, as they were then."""
    standby_replicas: int = 0
    """That the group epoch was decided with."""
    topics_revision: int = 0
    """Of the topics that the target was computed from: a coordinator that knows older ones must not decide."""
    awaits_members: bool = False
    """The first member joined a moment ago: nobody is given anything before the initial delay is over."""
    shutdown_by: MemberId | None = None
    """Who asked that all members shut down; they are told so until none is left."""
    endpoint_epoch: int = 0
    """Rises when what is read behind endpoints changes."""
    members: Mapping[MemberId, StreamsMember] = field(default_factory=dict[MemberId, StreamsMember], metadata=VOLATILE)
    target: Mapping[MemberId, Tasks] = field(default_factory=dict[MemberId, Tasks], metadata=VOLATILE)
    seen: Cluster | None = field(default=None, compare=False, repr=False, metadata=VOLATILE)
    """The topics that `configured` was made with; None before the first."""
    configured: Configured | None = field(default=None, compare=False, repr=False, metadata=VOLATILE)
    unheard: frozenset[MemberId] = field(default=frozenset(), metadata=VOLATILE)
    """Members that have not spoken since a coordinator took the group over."""
    session_deadlines: Deadlines = field(default_factory=no_deadlines, metadata=VOLATILE)
    rebalance_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """Of members that are to let go of tasks."""
    delay_deadline_ms: int | None = field(default=None, metadata=VOLATILE)
    """When the initial delay is over."""


def state_of(group: StreamsGroup) -> StreamsGroupState:
    if not group.members:
        return StreamsGroupState.EMPTY
    if not group.is_ready:
        return StreamsGroupState.NOT_READY
    if group.awaits_members or group.group_epoch > group.assignment_epoch:
        return StreamsGroupState.ASSIGNING
    stable = all(
        member.state is MemberState.STABLE and member.member_epoch == group.assignment_epoch
        for member in group.members.values()
    )
    return StreamsGroupState.STABLE if stable else StreamsGroupState.RECONCILING


def has_news(group: StreamsGroup, cluster: Cluster) -> bool:
    """Whether these topics may be others than the group was last compared with."""
    return group.seen is None or group.seen.topics is not cluster.topics
