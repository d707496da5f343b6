"""The vocabulary of the classic group coordinator: the group as a value, its events and its replies.

The one idea: this module has no behaviour. `classic.step(group, event, now_ms, settings)` reads a `Group` and an event
and returns a `Step`. The runner (`gateway/groups/runtime.py`) stores what changed, then sends the replies. There are no
futures, sockets or clocks: a parked request is its `request_id`, a timer is a deadline in ms on the runner's monotonic
clock. Declaring a field here stores it (`document.py`), unless it is volatile.
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
    """States of a classic group, with upstream's names, as DescribeGroups and ListGroups show them."""

    __hash__ = object.__hash__
    """Every event looks up its state, and Enum's own hash is a Python call."""

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
"""The states that each state may lead to (upstream's ClassicGroupState lists the opposite direction)."""


class MigrationPolicy(Enum):
    """`group.consumer.migration.policy`: in which direction a group with members may change its protocol."""

    BIDIRECTIONAL = "bidirectional"
    UPGRADE = "upgrade"
    DOWNGRADE = "downgrade"
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """Settings of consumer groups (KIP-848); names and defaults are Kafka's `group.consumer.*`. The two intervals
    may be set per group."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = 2**31 - 1
    assignors: tuple[str, ...] = ("uniform", "range")
    """The first assignor is used if no member asks for one."""
    handoff: HandoffSettings = DEFAULTS
    cooperative_guard: bool = False
    """The setting of the classic group with this id (`Settings.group_cooperative_guard`)."""
    migration_policy: MigrationPolicy = MigrationPolicy.BIDIRECTIONAL


@dataclass(frozen=True, slots=True)
class StreamsSettings:
    """Settings of streams groups (KIP-1071); names and defaults are Kafka's `group.streams.*`. All but the size may
    be set per group."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = 2**31 - 1
    num_standby_replicas: int = 0
    initial_rebalance_delay_ms: int = 3_000


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """Settings of share groups (KIP-932); names and defaults are Kafka's `group.share.*` and `share.*`. Sizes and
    limits belong to the broker; the others may be set per group."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = 200
    record_lock_duration_ms: int = 30_000
    max_record_locks: int = 2_000
    """Most records of one partition that are neither settled nor waiting for their first delivery."""
    delivery_count_limit: int = 5
    auto_offset_reset: str = "latest"
    """The offset at which a group begins: `latest`, `earliest`, or `by_duration:` with an ISO 8601 duration."""
    read_committed: bool = False
    renews: bool = True
    """True if members may extend their locks."""
    dead_letter_topic: str = ""
    """Topic for records that are rejected or were delivered too often (KIP-1191). Empty: none."""
    copies_dead_letters: bool = False
    """True if key and value are copied to that topic too."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Broker settings that the coordinator reads. Names and defaults are Kafka's, except for the last ones."""

    group_initial_rebalance_delay_ms: int = 3000
    group_min_session_timeout_ms: int = 6000
    group_max_session_timeout_ms: int = 1_800_000
    group_max_size: int = 2**31 - 1
    new_member_join_timeout_ms: int = 300_000
    """How long a member is kept that waits for the reply to its first join (5 min, fixed in upstream)."""
    group_connection_grace_ms: int = 10_000
    """How long a dynamic member outlives a connection that its peer closed; −1: only the session timeout counts."""
    group_cooperative_guard: bool = False
    """True if partitions that one member claims are never delivered to another, even if the leader assigns them."""
    handoff: HandoffSettings = DEFAULTS
    """For classic groups without a setting of their own."""
    drains: bool = False
    """True if any group is in mode `drain`."""
    consumer: ConsumerSettings = ConsumerSettings()
    consumer_of: Mapping[str, ConsumerSettings] = field(default_factory=dict[str, ConsumerSettings])
    """By group id, for groups with settings of their own."""
    streams: StreamsSettings = StreamsSettings()
    streams_of: Mapping[str, StreamsSettings] = field(default_factory=dict[str, StreamsSettings])
    """By group id, for groups with settings of their own."""
    share: ShareSettings = ShareSettings()
    share_of: Mapping[str, ShareSettings] = field(default_factory=dict[str, ShareSettings])
    """By group id, for groups with settings of their own."""

    def consumer_for(self, group_id: str) -> ConsumerSettings:
        return self.consumer_of.get(group_id, self.consumer)

    def streams_for(self, group_id: str) -> StreamsSettings:
        return self.streams_of.get(group_id, self.streams)

    def share_for(self, group_id: str) -> ShareSettings:
        return self.share_of.get(group_id, self.share)

    def guards(self, group_id: str) -> bool:
        own = self.consumer_of.get(group_id)
        return self.group_cooperative_guard if own is None else own.cooperative_guard

    def handoff_of(self, group_id: str) -> HandoffSettings:
        own = self.consumer_of.get(group_id)
        return self.handoff if own is None else own.handoff


@dataclass(frozen=True, slots=True)
class Parked:
    """A parked request, and the only connection on which it can be answered."""

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
    """The member's assignment in the current generation; b"" until the leader has sent it."""
    last_assignment: bytes = b""
    """The member's assignment in the last assigned generation, kept if handoffs are drained."""
    position: int = 0
    """Order of joining, in which members are listed and become leader."""
    is_new: bool = field(default=False, metadata=VOLATILE)
    """True while the member waits for the reply to its first join. While that join is parked, the session timer is
    the new-member timeout."""
    parked_join: Parked | None = field(default=None, metadata=VOLATILE)
    parked_sync: Parked | None = field(default=None, metadata=VOLATILE)
    connection_id: ConnectionId | None = field(default=None, metadata=VOLATILE)
    """The connection that last spoke for this member; None after a restart or once it has closed."""
    connection_number: int = field(default=-1, metadata=VOLATILE)
    """Number of the connection by which the member last joined."""
    member_epoch: int = 0
    """The member's epoch in the consumer group that this group was before: it counts as its generation until the
    next one begins. 0: use the group's own."""


@dataclass(frozen=True, slots=True)
class PendingMember:
    """An id that was handed out with MEMBER_ID_REQUIRED (KIP-394) and has not joined yet."""

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
    """True if the epoch of the named member fences the commit, not the group's generation."""
    by_producer: bool = False
    """True if neither fences it: the commit names no member, and the producer of its transaction is responsible for
    it."""
    stale: ErrorCode = ErrorCode.STALE_MEMBER_EPOCH
    """The error for a member whose stored epoch differs."""
    member_epoch: int | None = None
    """The epoch by which Postgres fences the commit if that may be newer than the one it names; None: the named
    epoch."""


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
    """An assignment that was sent to a member."""

    generation_id: int
    assignment: bytes


@dataclass(frozen=True, slots=True)
class Watch:
    """Observations that are kept of a group from one generation to the next."""

    absent: Mapping[MemberId, frozenset[tuple[str, int]]] = field(
        default_factory=dict[MemberId, frozenset[tuple[str, int]]]
    )
    """Static members that have not joined the current generation, and the partitions they may hold. Their claims of
    their last join do not show what they were assigned since."""
    half_way: bool = False
    """True if its members are partly eager and partly cooperative: see `observer.is_half_way`."""
    withheld: bool = False
    """True if partitions of this generation were withheld from the members they were assigned to."""
    follow_up_ms: int | None = field(default=None, metadata=VOLATILE)
    """When a rebalance must begin because partitions were withheld, if none has begun before."""
    delivered: Mapping[MemberId, Delivered] = field(default_factory=dict[MemberId, Delivered], metadata=VOLATILE)
    unassigned: Mapping[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int], metadata=VOLATILE)
    """Partitions without an owner, and for how many generations in a row."""
    member_ids: frozenset[MemberId] = field(default=frozenset(), metadata=VOLATILE)
    generations_ms: tuple[int, ...] = field(default=(), metadata=VOLATILE)
    """Start times of the latest generations with exactly these members."""
    cooperative: bool | None = field(default=None, metadata=VOLATILE)
    """The protocol of the last generation that had members."""


@dataclass(frozen=True)
class Group:
    """One classic group at one moment. A missing group is `Group(group_id)`: Empty, generation 0, never stored.

    Deadlines are plain numbers here: `session_deadlines` per member, `phase_deadline_ms` for the one timer that the
    state allows (initial delay, join phase, pending sync), and those of pending members. No mapping is ever mutated.
    """

    group_id: str = field(metadata=VOLATILE)
    state: GroupState = GroupState.EMPTY
    exists: bool = field(default=False, metadata=VOLATILE)
    """False until the first join, commit or stored record."""
    protocol_type: str | None = None
    protocol_name: str | None = None
    """The protocol elected for the current generation; None while the group is Empty."""
    generation_id: int = 0
    leader_id: MemberId | None = None
    members: Mapping[MemberId, Member] = field(default_factory=dict[MemberId, Member], metadata=VOLATILE)
    """Members in the order of joining. Each is stored separately."""
    pending: Mapping[MemberId, PendingMember] = field(default_factory=dict[MemberId, PendingMember], metadata=VOLATILE)
    pending_sync: frozenset[MemberId] = field(default=frozenset(), metadata=VOLATILE)
    """Members whose SyncGroup of this generation is missing. Members still missing at the phase deadline are
    removed."""
    untold: frozenset[MemberId] = field(default=frozenset(), metadata=VOLATILE)
    """During a join phase: members that had not received their assignment before it began, and so own none of it."""
    unheard: frozenset[MemberId] = field(default=frozenset(), metadata=VOLATILE)
    """Members that have not spoken since the group was read back."""
    session_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """A member without a deadline has a parked request, which proves that it is alive."""
    connection_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """Members whose connection has closed, and the end of their grace period."""
    phase_deadline_ms: int | None = field(default=None, metadata=VOLATILE)
    initial_delay_remaining_ms: int | None = field(default=None, metadata=VOLATILE)
    """Not None while the initial rebalance delay runs: the part of the rebalance timeout that remains for
    extensions."""
    new_member_added: bool = field(default=False, metadata=VOLATILE)
    """True if a member was added since the initial delay was last extended."""
    subscribed_topics: frozenset[str] | None = field(default=None, metadata=VOLATILE)
    """Topics of all members' subscriptions; None if they cannot be known (another protocol type, or malformed)."""
    watch: Watch = Watch()
    handoffs: tuple[Handoff, ...] = ()
    """Partitions that a previous owner had to release or drain, in this generation or an earlier one, and has not
    yet."""
    hold_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """Members that gain such partitions in this generation, and until when their SyncGroup may be held."""
    awaiting_join: int = field(default=0, metadata=VOLATILE)
    """Number of members with a parked join. Derived from `members`; kept so that a join need not count them."""
    protocol_support: Mapping[str, int] = field(default_factory=dict[str, int], metadata=VOLATILE)
    """Number of members that list each protocol. Derived from `members`; kept so that a join need not ask them all."""

    def with_session_deadline(self, member_id: MemberId, deadline_ms: int) -> Group:
        """Return the same group with one session deadline moved.

        Heartbeats are the only frequent event, and copying the attributes at once takes a tenth of the constructor's
        time. That is why a group has no slots.
        """
        moved = object.__new__(Group)
        attributes = moved.__dict__
        attributes.update(self.__dict__)
        attributes["session_deadlines"] = {**self.session_deadlines, member_id: deadline_ms}
        return moved

    def with_watch(self, watch: Watch) -> Group:
        """Return the same group with new observations, copied as above."""
        seen = object.__new__(Group)
        attributes = seen.__dict__
        attributes.update(self.__dict__)
        attributes["watch"] = watch
        return seen


GROUP_FIELDS = tuple(each.name for each in fields(Group))
