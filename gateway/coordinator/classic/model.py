"""The vocabulary of the classic machine: the group as a value, its events and its replies.

The one idea: this module has no behaviour. `machine.step(group, event, now_ms, settings)` reads a `Group` and an event
and returns a `Step`. The runner (`gateway/groups/runtime.py`) stores what changed, then sends the replies. There are no
futures, sockets or clocks: a parked request is its `request_id`, a timer is a deadline in ms on the runner's monotonic
clock. Declaring a field here stores it (`document.py`), unless it is volatile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum

from gateway.coordinator.document import VOLATILE
from gateway.coordinator.facts import MemberId
from gateway.coordinator.handoff import Handoff
from gateway.coordinator.machine import ConnectionClosed, ConnectionId, RequestId, Tick
from gateway.coordinator.requests import (
    DeleteGroup,
    HandoffProgress,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    OffsetCommit,
    Protocols,
    SyncGroup,
    TxnOffsetCommit,
)


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
    """Order of joining. Members are listed in this order, and become leader in this order."""
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
    topics_revision: int = 0
    """Revision of the topics at the last assignment. A coordinator that knows only older topics may not know those that
    were assigned."""
    follow_up_ms: int | None = field(default=None, metadata=VOLATILE)
    """Time at which a rebalance must begin because partitions were withheld, unless one has begun before."""
    delivered: Mapping[MemberId, Delivered] = field(default_factory=dict[MemberId, Delivered], metadata=VOLATILE)
    unassigned: Mapping[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int], metadata=VOLATILE)
    """Partitions without an owner, each with the number of generations for which it had none."""
    member_ids: frozenset[MemberId] = field(default=frozenset(), metadata=VOLATILE)
    generations_ms: tuple[int, ...] = field(default=(), metadata=VOLATILE)
    """Start times of the latest generations with exactly these members."""
    cooperative: bool | None = field(default=None, metadata=VOLATILE)
    """The cooperative protocol that the last generation with members used, if any."""


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
    """Members that have sent no request since the group was read from Postgres."""
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
    """For each member that waits for a partition in this generation, the time at which its held SyncGroup is answered
    at the latest.
    """
    awaiting_join: int = field(default=0, metadata=VOLATILE)
    """Number of members with a parked join. Derived from `members`; kept so that a join need not count them."""
    protocol_support: Mapping[str, int] = field(default_factory=dict[str, int], metadata=VOLATILE)
    """Number of members that list each protocol. Derived from `members`; kept so that a join need not check all
    members.
    """
    offered_bytes: int = field(default=0, metadata=VOLATILE)
    """Size of the metadata of all members. Derived from `members`; kept so that a join need not add it up."""

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
