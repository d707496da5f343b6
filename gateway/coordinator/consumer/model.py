"""The vocabulary of the consumer group coordinator (KIP-848): the group as a value, its events, its replies.

The one idea: as in the classic machine, nothing here does anything. `machine.step` reads a group and an event and says
what becomes of both. A group moves by three epochs: the group's (what members want), the target assignment's (what was
computed from it) and each member's (how far that member has come).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from operator import attrgetter
from uuid import UUID

from gateway.coordinator.cluster import Cluster, Describing, Reader
from gateway.coordinator.consumer.partitions import Partitions, nothing
from gateway.coordinator.consumer.sessions import Deadlines, no_deadlines
from gateway.coordinator.consumer.spread import Spread
from gateway.coordinator.consumer.topics import Pattern, Shown
from gateway.coordinator.document import VOLATILE
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ClientRequest, ConnectionId
from gateway.coordinator.model import ConsumerSettings, Protocols
from protocol.errors import ErrorCode


class GroupState(Enum):
    """Rendered as upstream does."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"
    DEAD = "Dead"


class MemberState(Enum):
    STABLE = "stable"
    UNREVOKED = "unrevoked_partitions"
    """Has partitions that it is to let go of, and has not said yet that it did."""
    UNRELEASED = "unreleased_partitions"
    """Awaits partitions that another member has not let go of."""


@dataclass(frozen=True, slots=True)
class ClassicProtocol:
    """What a member that speaks the classic protocol said when it last joined."""

    session_timeout_ms: int
    protocols: Protocols
    """Its own first one is its group protocol; the others matter where the group becomes a classic one."""


@dataclass(frozen=True, slots=True)
class ConsumerMember:
    member_id: MemberId
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    principal: str | None = None
    """Of a member with a pattern, where there are ACLs. None besides: of what a release without them stored, and then
    the pattern shows everything until the member speaks."""
    rebalance_timeout_ms: int = -1
    """How long it may take to let go of partitions."""
    subscribed_topic_names: tuple[str, ...] = ()
    """Sorted, each once."""
    subscribed_topic_regex: str = ""
    """"" for none."""
    server_assignor: str | None = None
    member_epoch: int = 0
    previous_member_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: Partitions = field(default_factory=nothing)
    """What it was told that it may own."""
    pending_revocation: Partitions = field(default_factory=nothing)
    """What it was told to let go of, and may own still."""
    untaken: Partitions = field(default_factory=nothing)
    """What of both it was told since it last joined, and has not said yet that it owns."""
    is_to_take: bool = False
    """It was last told to take over what is `untaken` of what it is to let go of, too."""
    undrained: Partitions = field(default_factory=nothing)
    """What it has let go of, and is still to commit up to what it was served: nobody else may own it yet."""
    classic: ClassicProtocol | None = None
    """None: it speaks the consumer protocol. Otherwise its member epoch is what it calls its generation."""
    connection_number: int = field(default=-1, metadata=VOLATILE)
    """The newest connection that has spoken for it. What comes on an older one was overtaken."""
    connection_id: ConnectionId | None = field(default=None, metadata=VOLATILE)
    """Of the same one; what was served on it was served to this member, whatever client id asked."""


def session_ms(member: ConsumerMember, settings: ConsumerSettings) -> int:
    """How long the member may be silent: a classic one says so itself."""
    return settings.session_timeout_ms if member.classic is None else member.classic.session_timeout_ms


Subscription = tuple[tuple[str, ...], str, tuple[str, str] | None]
"""Names, pattern, and principal and host that the pattern is resolved for. Members with equal ones share everything
that is derived from them."""

ReadAs = tuple[tuple[str, ...], str, Reader | None]
"""The same of all that the ACLs do not tell apart; None: the pattern shows all that it matches."""


def subscription_of(member: ConsumerMember) -> Subscription:
    who = None
    if member.principal is not None and member.subscribed_topic_regex:
        who = member.principal, member.client_host
    return member.subscribed_topic_names, member.subscribed_topic_regex, who


def read_as(subscription: Subscription, describing: Describing | None) -> ReadAs:
    names, text, who = subscription
    return names, text, None if who is None or describing is None else describing.like(*who)


# --- replies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConsumerGroupHeartbeatReply:
    error: ErrorCode
    message: str | None = None
    member_id: MemberId | None = None
    member_epoch: int = 0
    heartbeat_interval_ms: int = 0
    assignment: Partitions | None = None
    """All that the member may own now; None where it is as it was told before."""


# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConsumerGroupHeartbeat(ClientRequest[ConsumerGroupHeartbeatReply]):
    """A request of that name. None and −1 mean "as before"; so does an absent `owned`."""

    connection_number: int
    """Rises with every connection that the node accepts: tells a late request from a new one."""
    version: int
    client_id: str
    client_host: str
    new_member_id: MemberId
    """An unguessable id, taken by a member of version 0 that comes without one."""
    member_id: MemberId
    member_epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = -1
    subscribed_topic_names: tuple[str, ...] | None = None
    subscribed_topic_regex: str | None = None
    server_assignor: str | None = None
    owned: Partitions | None = None
    principal: str | None = None
    """None: nobody asks who may do what."""


@dataclass(frozen=True, slots=True)
class Moving:
    """A partition on its way from one member to another."""

    source: MemberId
    target: MemberId | None
    """None: whoever was to have it is gone, or nobody was."""
    epoch: int
    """At which the target was to have it."""
    since_ms: int
    deadline_ms: int = 0
    """When it is given away though it is not drained; counts from when the source has let go, 0 until then."""
    mark: int | None = None
    """The offset after what the source was served, if known."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A partition whose owner was told so in the classic group that this one was, before its source was done."""

    topic_id: UUID
    partition: int
    source: MemberId
    """Is still to commit what it was served."""
    owner: MemberId
    """Is not told where to read on until then."""
    mark: int | None = field(default=None, metadata=VOLATILE)
    """The offset after what the source was served, if known."""
    since_ms: int = field(default=0, metadata=VOLATILE)
    deadline_ms: int = field(default=0, metadata=VOLATILE)


# --- the group ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConsumerGroup:
    """One consumer group at one moment. No mapping is ever mutated.

    Members, targets and epochs are what is stored. `owners`, `instances` and `subscriptions` follow from members,
    `patterns` from the cluster's topics, and deadlines begin anew where the group is read back.
    """

    group_id: str = field(metadata=VOLATILE)
    exists: bool = field(default=False, metadata=VOLATILE)
    is_deleted: bool = field(default=False, metadata=VOLATILE)
    group_epoch: int = 0
    assignment_epoch: int = 0
    metadata_hash: int = 0
    """Of the subscribed topics as they were when the group epoch was last decided."""
    assignor: str = ""
    """Which one computed the target."""
    topics_revision: int = 0
    """Of the topics that the target was computed from: a coordinator that knows older ones must not decide."""
    members: Mapping[MemberId, ConsumerMember] = field(
        default_factory=dict[MemberId, ConsumerMember], metadata=VOLATILE
    )
    target: Mapping[MemberId, Partitions] = field(default_factory=dict[MemberId, Partitions], metadata=VOLATILE)
    owners: Mapping[UUID, Mapping[int, MemberId]] = field(
        default_factory=dict[UUID, Mapping[int, MemberId]], metadata=VOLATILE
    )
    """Who may own each partition: it is among what is assigned to it, or still pending revocation."""
    instances: Mapping[str, MemberId] = field(default_factory=dict[str, MemberId], metadata=VOLATILE)
    """Static members by instance id."""
    subscriptions: Mapping[Subscription, int] = field(default_factory=dict[Subscription, int], metadata=VOLATILE)
    """How many members have each."""
    patterns: Mapping[str, Pattern] = field(default_factory=dict[str, Pattern], metadata=VOLATILE)
    postponed: str = field(default="", metadata=VOLATILE)
    """A pattern that is resolved with the group's next request, as upstream resolves one behind the heartbeat that
    brings it: its member is assigned the topics that it names first."""
    shown: Mapping[tuple[str, Reader], Shown] = field(
        default_factory=dict[tuple[str, Reader], Shown], metadata=VOLATILE
    )
    """What each pattern shows to whom, as far as that is not all."""
    seen: Cluster | None = field(default=None, compare=False, repr=False, metadata=VOLATILE)
    """The topics that `metadata_hash`, `patterns` and `shown` were last compared with; None before the first."""
    unheard: frozenset[MemberId] = field(default=frozenset(), metadata=VOLATILE)
    """Members that have not spoken since a coordinator took the group over."""
    spread: Spread | None = field(default=None, compare=False, repr=False, metadata=VOLATILE)
    """How the target spreads partitions, where `uniform` computed it for members that all want the same."""
    session_deadlines: Deadlines = field(default_factory=no_deadlines, metadata=VOLATILE)
    rebalance_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """Until when members in state UNREVOKED must have let go."""
    moving: Mapping[tuple[UUID, int], Moving] = field(default_factory=dict[tuple[UUID, int], Moving], metadata=VOLATILE)
    """Partitions that their owners are to let go of, or to drain, for somebody else."""
    unsettled: tuple[Unsettled, ...] = ()
    """What owners of the classic group before may not read yet."""
    drain_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """When the first of what each member has not drained is given away."""
    join_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """Until when members of the classic protocol that were told of a rebalance must have joined again."""
    sync_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """Until when members of the classic protocol that have joined must have fetched their assignment."""

    def with_session_deadline(self, member_id: MemberId, deadline_ms: int) -> ConsumerGroup:
        """The same group with one session deadline moved: all that a heartbeat without news does. Writing the slots
        costs half of what a frozen dataclass' own constructor does."""
        moved = object.__new__(ConsumerGroup)
        for write, value in zip(_WRITERS, _VALUES(self), strict=True):
            write(moved, value)
        _WRITE_SESSION_DEADLINES(moved, self.session_deadlines.moved(member_id, deadline_ms))
        return moved


_FIELDS = tuple(each.name for each in fields(ConsumerGroup))
_VALUES = attrgetter(*_FIELDS)
_WRITERS = tuple(getattr(ConsumerGroup, name).__set__ for name in _FIELDS)
_WRITE_SESSION_DEADLINES = _WRITERS[_FIELDS.index("session_deadlines")]


@dataclass(frozen=True, slots=True)
class MemberRow:
    """What is stored of one member: a row, which an acknowledgement or a new share rewrites."""

    member: ConsumerMember
    target: Partitions
