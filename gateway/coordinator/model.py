"""The vocabulary of the classic group coordinator: the group as a value, the events it takes, the replies it gives.

The one idea: nothing here does anything. `classic.step(group, event, now_ms, settings)` reads a `Group` and an event
and returns a `Step`; the runner (`gateway/groups/runtime.py`) stores what changed, then sends the replies. There are no
futures, sockets or clocks: a parked request is its `request_id`, a timer is a deadline in ms on the runner's monotonic
clock. A field declared here is stored by that (`document.py`), unless it is volatile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from uuid import UUID

from gateway.coordinator.document import VOLATILE
from gateway.coordinator.facts import MemberId
from gateway.coordinator.handoff import DEFAULTS, Drained, Handoff, HandoffSettings
from gateway.coordinator.machine import (
    ClientRequest,
    ConnectionClosed,
    ConnectionId,
    News,
    Request,
    RequestId,
    Step,
    Tick,
)
from protocol.errors import ErrorCode

__all__ = ["ConnectionClosed", "ConnectionId", "MemberId", "RequestId", "Step", "Tick"]

Protocols = tuple[tuple[str, bytes], ...]
"""Protocols in the member's order of preference: (name, metadata)."""


class GroupState(Enum):
    """Rendered names are upstream's, as DescribeGroups and ListGroups show them."""

    __hash__ = object.__hash__
    """Every event looks its state up; Enum's own hash is a call of Python."""

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


class MigrationPolicy(Enum):
    """`group.consumer.migration.policy`: which way a group with members may change its protocol."""

    BIDIRECTIONAL = "bidirectional"
    UPGRADE = "upgrade"
    DOWNGRADE = "downgrade"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """Of consumer groups (KIP-848); names and defaults are Kafka's `group.consumer.*`. The two intervals may be a
    group's own."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = 2**31 - 1
    assignors: tuple[str, ...] = ("uniform", "range")
    """The first is used where no member asks for one."""
    handoff: HandoffSettings = DEFAULTS
    migration_policy: MigrationPolicy = MigrationPolicy.BIDIRECTIONAL


@dataclass(frozen=True, slots=True)
class StreamsSettings:
    """Of streams groups (KIP-1071); names and defaults are Kafka's `group.streams.*`. All but the size may be a group's
    own."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = 2**31 - 1
    num_standby_replicas: int = 0
    initial_rebalance_delay_ms: int = 3_000


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """Of share groups (KIP-932); names and defaults are Kafka's `group.share.*` and `share.*`. Sizes and limits are the
    broker's, the others may be a group's own."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = 200
    record_lock_duration_ms: int = 30_000
    max_record_locks: int = 2_000
    """Most records of one partition that are neither settled nor waiting for their first delivery."""
    delivery_count_limit: int = 5
    auto_offset_reset: str = "latest"
    """Where a group begins in a partition: `latest`, `earliest`, or `by_duration:` and an ISO 8601 duration."""
    read_committed: bool = False
    dead_letter_topic: str = ""
    """Where records go that are rejected or were delivered too often (KIP-1191). Empty: nowhere."""
    copies_dead_letters: bool = False
    """Whether key and value go there too."""


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
    group_cooperative_guard: bool = False
    """Partitions that one member claims are not delivered to another, whatever the leader says."""
    handoff: HandoffSettings = DEFAULTS
    """Of classic groups without a setting of their own."""
    drains: bool = False
    """Whether any group is in mode `drain`."""
    consumer: ConsumerSettings = ConsumerSettings()
    consumer_of: Mapping[str, ConsumerSettings] = field(default_factory=dict[str, ConsumerSettings])
    """Of the groups that have configs of their own, by group id."""
    streams: StreamsSettings = StreamsSettings()
    streams_of: Mapping[str, StreamsSettings] = field(default_factory=dict[str, StreamsSettings])
    """Likewise."""
    share: ShareSettings = ShareSettings()
    share_of: Mapping[str, ShareSettings] = field(default_factory=dict[str, ShareSettings])
    """Likewise."""

    def handoff_of(self, group_id: str) -> HandoffSettings:
        own = self.consumer_of.get(group_id)
        return self.handoff if own is None else own.handoff


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
    last_assignment: bytes = b""
    """What it was given in the last generation that was assigned, kept where handoffs are drained."""
    position: int = 0
    """Members are told, and lead, in the order of joining."""
    is_new: bool = field(default=False, metadata=VOLATILE)
    """Awaits its first join answer; while that join is held, the session timer is the new-member timeout."""
    parked_join: Parked | None = field(default=None, metadata=VOLATILE)
    parked_sync: Parked | None = field(default=None, metadata=VOLATILE)
    connection_id: ConnectionId | None = field(default=None, metadata=VOLATILE)
    """The connection that last spoke for this member; None after a restart or once it has closed."""
    connection_number: int = field(default=-1, metadata=VOLATILE)
    """Of the connection that it last joined by."""
    member_epoch: int = 0
    """How far it had come in the consumer group that this group was: its generation until the next one begins. 0 for
    the group's own."""


@dataclass(frozen=True, slots=True)
class PendingMember:
    """An id handed out with MEMBER_ID_REQUIRED (KIP-394) that has not joined yet."""

    member_id: MemberId
    connection_id: ConnectionId
    deadline_ms: int


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
    """The commit is to be fenced by the epoch of the member that it names, not by the group's generation."""
    by_producer: bool = False
    """Nor by that: it names nobody, and the producer whose transaction it is part of answers for it."""
    stale: ErrorCode = ErrorCode.STALE_MEMBER_EPOCH
    """What the member is told if Postgres knows another epoch of it."""
    member_epoch: int | None = None
    """The epoch by which Postgres is to fence it where that may be a newer one than the commit names; None: that."""


@dataclass(frozen=True, slots=True)
class DeleteReply:
    error: ErrorCode


Reply = JoinReply | SyncReply | HeartbeatReply | LeaveReply | OffsetCommitReply | DeleteReply


# --- events: each that carries a request_id gets exactly one reply, now or in a later step -------------------------


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
    """An unguessable id, taken if this request makes a new member (the coordinator has no randomness of its own)."""
    reason: str | None = None
    connection_number: int = -1
    """Rises with every connection that the node accepts: tells a late request from a new one."""


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
    """Asks whether a commit may go to Postgres; the generation is fenced there once more."""

    version: int
    member_id: MemberId
    group_instance_id: str | None
    generation_id: int
    """Or the member's epoch."""
    partitions: tuple[tuple[UUID, int], ...] = ()
    """(topic id, partition): what is to be committed."""


@dataclass(frozen=True, slots=True)
class TxnOffsetCommit(ClientRequest[OffsetCommitReply]):
    """The same of a commit that counts once a producer's transaction does."""

    member_id: MemberId
    group_instance_id: str | None
    generation_id: int
    """Or the member's epoch."""
    partitions: tuple[tuple[UUID, int], ...] = ()
    """(topic id, partition): what is to be committed."""

    @property
    def names_nobody(self) -> bool:
        """Neither a member nor a generation: only the producer answers for it, as before version 3."""
        return self.generation_id < 0 and not self.member_id and self.group_instance_id is None


@dataclass(frozen=True, slots=True)
class DeleteGroup(Request[DeleteReply]):
    """Takes the group away, if it is Empty."""


@dataclass(frozen=True, slots=True)
class HandoffProgress(News):
    """How far the sources of handoffs have committed; found outside the group, so it may be late. Nobody waits for it.

    It is taken by every machine that has handoffs.
    """

    found: tuple[Drained, ...] = ()
    passed: tuple[tuple[MemberId, str, int], ...] = ()
    """(target, topic, partition): who has read a committed offset that was not settled, and goes on from there."""


Event = (
    JoinGroup
    | SyncGroup
    | Heartbeat
    | LeaveGroup
    | OffsetCommit
    | TxnOffsetCommit
    | DeleteGroup
    | ConnectionClosed
    | Tick
    | HandoffProgress
)


@dataclass(frozen=True, slots=True)
class Delivered:
    """An assignment that a member was answered with."""

    generation_id: int
    assignment: bytes


@dataclass(frozen=True, slots=True)
class Watch:
    """What the observer remembers of a group from one generation to the next."""

    absent: Mapping[MemberId, frozenset[tuple[str, int]]] = field(
        default_factory=dict[MemberId, frozenset[tuple[str, int]]]
    )
    """Static members that have not joined the current generation, and what they may hold: what they said when they
    joined says nothing of what they were given since."""
    half_way: bool = False
    """Its members are between eager and cooperative: see `observer.is_half_way`."""
    withheld: bool = False
    """Partitions of this generation were withheld from who was to have them."""
    follow_up_ms: int | None = field(default=None, metadata=VOLATILE)
    """When a rebalance begins if none has begun by then, because they were."""
    delivered: Mapping[MemberId, Delivered] = field(default_factory=dict[MemberId, Delivered], metadata=VOLATILE)
    unassigned: Mapping[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int], metadata=VOLATILE)
    """Partitions that nobody has, and for how many generations in a row."""
    member_ids: frozenset[MemberId] = field(default=frozenset(), metadata=VOLATILE)
    generations_ms: tuple[int, ...] = field(default=(), metadata=VOLATILE)
    """When the latest generations of these very members began."""
    cooperative: bool | None = field(default=None, metadata=VOLATILE)
    """Of the last generation that had members."""


@dataclass(frozen=True)
class Group:
    """One classic group at one moment. A missing group is `Group(group_id)`: Empty, generation 0, never stored.

    Deadlines live here as plain numbers: `session_deadlines` per member, `phase_deadline_ms` for the one timer that
    the state allows (initial delay, join phase, pending sync), pending members' own. No mapping is ever mutated.
    """

    group_id: str = field(metadata=VOLATILE)
    state: GroupState = GroupState.EMPTY
    exists: bool = field(default=False, metadata=VOLATILE)
    """False until the first join, commit or stored record: an id that nobody has used."""
    protocol_type: str | None = None
    protocol_name: str | None = None
    """The vote's winner of the current generation; None while the group is Empty."""
    generation_id: int = 0
    leader_id: MemberId | None = None
    members: Mapping[MemberId, Member] = field(default_factory=dict[MemberId, Member], metadata=VOLATILE)
    """In the order of joining. Stored member by member."""
    pending: Mapping[MemberId, PendingMember] = field(default_factory=dict[MemberId, PendingMember], metadata=VOLATILE)
    pending_sync: frozenset[MemberId] = field(default=frozenset(), metadata=VOLATILE)
    """Members whose SyncGroup this generation still awaits; whoever stays here until the phase deadline is removed."""
    untold: frozenset[MemberId] = field(default=frozenset(), metadata=VOLATILE)
    """During a join phase: members who were not told their assignment before it began, and have none of it."""
    unheard: frozenset[MemberId] = field(default=frozenset(), metadata=VOLATILE)
    """Members who have not spoken since the group was read back."""
    session_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """A member without one has a parked request, which is sign of life enough."""
    connection_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """Members whose connection has closed, and when the grace ends."""
    phase_deadline_ms: int | None = field(default=None, metadata=VOLATILE)
    initial_delay_remaining_ms: int | None = field(default=None, metadata=VOLATILE)
    """Not None while the initial rebalance delay runs: what is left of the rebalance timeout for extensions."""
    new_member_added: bool = field(default=False, metadata=VOLATILE)
    """A member was added since the initial delay was last extended."""
    subscribed_topics: frozenset[str] | None = field(default=None, metadata=VOLATILE)
    """Topics of all members' subscriptions; None where they cannot be known (other protocol types, malformed)."""
    watch: Watch = Watch()
    handoffs: tuple[Handoff, ...] = ()
    """Partitions that a member was to let go of (or drain) in this generation or an earlier one, and has not yet."""
    hold_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """Members that gain such partitions in this generation, and until when their SyncGroup may be held."""
    awaiting_join: int = field(default=0, metadata=VOLATILE)
    """How many members have a parked join. Follows from `members`; kept so that a join need not count them."""
    protocol_support: Mapping[str, int] = field(default_factory=dict[str, int], metadata=VOLATILE)
    """How many members list each protocol. Follows from `members`; kept so that a join need not ask them all."""

    def with_session_deadline(self, member_id: MemberId, deadline_ms: int) -> Group:
        """The same group with one session deadline moved.

        Heartbeats are all that is frequent here, and to copy the attributes at once takes a tenth of what the
        constructor does: that is why a group has no slots.
        """
        moved = object.__new__(Group)
        attributes = moved.__dict__
        attributes.update(self.__dict__)
        attributes["session_deadlines"] = {**self.session_deadlines, member_id: deadline_ms}
        return moved

    def with_watch(self, watch: Watch) -> Group:
        """The same group with what the observer remembers of it; as above."""
        seen = object.__new__(Group)
        attributes = seen.__dict__
        attributes.update(self.__dict__)
        attributes["watch"] = watch
        return seen


GROUP_FIELDS = tuple(each.name for each in fields(Group))
