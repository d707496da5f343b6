"""The vocabulary of the streams group coordinator (KIP-1071): the group as a value, its events, its replies.

The one idea: a streams group is a consumer group (KIP-848) whose members own tasks instead of partitions. The tasks
follow from a topology, which the first member sends, and from the topics that it reads. While these do not fit, no
member owns a task.
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
    """States of a streams group, with upstream's names."""

    EMPTY = "Empty"
    NOT_READY = "NotReady"
    """The topics that exist do not fit the topology."""
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"


class MemberState(Enum):
    STABLE = "stable"
    UNREVOKED = "unrevoked_tasks"
    """The member must revoke tasks and has not acknowledged that it did."""
    UNRELEASED = "unreleased_tasks"
    """The member waits for tasks that another member has not released."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address at which an instance answers queries of its state (Interactive Queries)."""

    host: str
    port: int


class EndpointPartitions(NamedTuple):
    """Partitions that the members behind an endpoint read: topic → partitions."""

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
    """Time that the member may take to revoke tasks."""
    topology_epoch: int = NO_TOPOLOGY
    user_endpoint: Endpoint | None = None
    client_tags: tuple[tuple[str, str], ...] = ()
    """The member's client tags, sorted."""
    member_epoch: int = 0
    previous_member_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: Tasks = NO_TASKS
    """Tasks that the coordinator has given to the member."""
    pending_revocation: Tasks = NO_TASKS
    """Tasks that the member must revoke, and may still own."""
    active_since: tuple[tuple[int, frozenset[Task]], ...] = ()
    """(epoch, active tasks assigned at that epoch) for all active tasks that the member holds. The member may commit
    their offsets at an epoch older than its own (`offsets.py`)."""
    connection_number: int = field(default=-1, metadata=VOLATILE)
    """Number of the connection that sent the member's last request."""

    @property
    def process(self) -> str:
        """Return the member's process. A member that sent no process id is alone in its own."""
        return self.process_id or self.member_id

    @property
    def held(self) -> Tasks:
        return self.assigned | self.pending_revocation


@dataclass(frozen=True, slots=True)
class StreamsMemberRow:
    """Stored row of one member."""

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
    """All tasks that the member may own now. None if they are the same as in the last reply that listed them."""
    status: tuple[tuple[StatusCode, str], ...] = ()
    missing_internal_topics: tuple[TopicInfo, ...] = ()
    """Internal topics to be created, each with its number of partitions."""
    endpoint_information_epoch: int = 0
    partitions_by_user_endpoint: tuple[EndpointPartitions, ...] | None = None
    """Partitions by endpoint. None if the member already knows the group's endpoints."""


@dataclass(frozen=True, slots=True)
class StreamsGroupHeartbeat(ClientRequest[StreamsGroupHeartbeatReply]):
    """A StreamsGroupHeartbeat request. None and −1 mean "as before"."""

    connection_number: int
    """Rises with every connection that the node accepts, to distinguish a late request from a new one."""
    client_id: str
    client_host: str
    member_id: MemberId
    member_epoch: int
    endpoint_information_epoch: int = 0
    """Epoch of the endpoints that the member knows."""
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
    """True if the member's topology reads topics by a regular expression."""
    shutdown_application: bool = False

    @property
    def owned(self) -> Tasks | None:
        return None if self.active is None or self.standby is None else Tasks(self.active, self.standby)


@dataclass(frozen=True, slots=True)
class StreamsGroup:
    """One streams group at one moment. No mapping is ever mutated.

    Members, targets, epochs and the topology are stored. Deadlines start anew when a coordinator reads the group back.
    """

    group_id: str = field(metadata=VOLATILE)
    exists: bool = field(default=False, metadata=VOLATILE)
    is_deleted: bool = field(default=False, metadata=VOLATILE)
    group_epoch: int = 0
    assignment_epoch: int = 0
    topology: Topology | None = None
    """The first member's topology. It is kept until another replaces it in a group without members."""
    is_ready: bool = False
    """True if the topics fitted the topology when the group epoch was last decided."""
    metadata_hash: int = 0
    """Hash of the topology's topics at that time."""
    standby_replicas: int = 0
    """Number of standby replicas that the group epoch was decided with."""
    topics_revision: int = 0
    """Revision of the topics that the target was computed from. A coordinator that knows only older topics must not
    decide."""
    awaits_members: bool = False
    """The first member joined recently: no task is assigned before the initial delay is over."""
    shutdown_by: MemberId | None = None
    """The member that asked all members to shut down. Responses repeat that until no member is left."""
    endpoint_epoch: int = 0
    """Rises when the partitions that are read behind endpoints change."""
    members: Mapping[MemberId, StreamsMember] = field(default_factory=dict[MemberId, StreamsMember], metadata=VOLATILE)
    target: Mapping[MemberId, Tasks] = field(default_factory=dict[MemberId, Tasks], metadata=VOLATILE)
    seen: Cluster | None = field(default=None, compare=False, repr=False, metadata=VOLATILE)
    """The topics that `configured` was made with; None before the first comparison."""
    configured: Configured | None = field(default=None, compare=False, repr=False, metadata=VOLATILE)
    unheard: frozenset[MemberId] = field(default=frozenset(), metadata=VOLATILE)
    """Members that have sent no request since a coordinator took the group over."""
    session_deadlines: Deadlines = field(default_factory=no_deadlines, metadata=VOLATILE)
    rebalance_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """Deadlines of members that must release tasks."""
    delay_deadline_ms: int | None = field(default=None, metadata=VOLATILE)
    """Time at which the initial delay is over."""


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
    """Return whether these topics may differ from those that the group was last compared with."""
    return group.seen is None or group.seen.topics is not cluster.topics
