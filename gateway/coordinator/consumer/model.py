"""The consumer group machine (KIP-848): the group as a value, its events, its replies.

The one idea: nothing in this module acts. `machine.step` takes a group and an event, and returns the group after it,
the replies and the facts. This page explains how a group moves; the code is in `heartbeat.py`, `draft.py`,
`current_assignment.py`, `handoff.py` and `unsettled.py`.

Three epochs. The group epoch rises when a member joins or leaves, when a member reads other topics than before, or when
the subscribed topics change. The assignment epoch is the group epoch that the target was computed for. The target says
which partitions each member should own. If the group epoch is ahead, the next heartbeat or JoinGroup computes the
target; a change of the topics computes it at once. The member epoch says how far one member has come on the way to the
target.

States of the group (`views.state_of`). EMPTY: no members. ASSIGNING: the group epoch is ahead of the assignment epoch.
RECONCILING: some member is not STABLE, or its epoch is not the assignment epoch. STABLE: all members have arrived.

States of a member (`current_assignment.reconcile`):

- STABLE: the member has what the target of its epoch gave it. A newer target begins the next round.
- UNREVOKED: the member must release `pending_revocation`. Its epoch does not rise before it has done so. A member that
  takes longer than its rebalance timeout is removed.
- UNRELEASED: the member has released everything and is at the epoch of the last target that it has met. It waits for
  partitions that others still own. It uses a shorter heartbeat interval, because the coordinator cannot push.

A change of the target, from the start to the end:

1. `target_moved` records what members gain from other owners in `moving`, unless the handoff mode is `off`.
2. At its next heartbeat, the old owner keeps what `assigned` and the target share. The rest goes to
   `pending_revocation`. The reply lists only what it keeps, except as described for `untaken`.
3. The old owner reports partitions that include all it keeps and none that it must release. That is its
   acknowledgement, unless `untaken` says that it may yet take over one of them. A member that joins, or that speaks the
   classic protocol, only has to report none that it must release.
4. In mode `drain` the released partitions become `undrained`. In the other modes they are free at once.
5. The new owner gets each free partition at its own next heartbeat. It is UNRELEASED until it has them all, then
   STABLE.

`owners` keeps this safe. A partition belongs to the member that lists it in `assigned`, `pending_revocation` or
`undrained`. `Draft.put` asserts that no partition has two owners, and no member gets a partition that another one owns.

`untaken`: the partitions that the coordinator has offered since the member joined, and that the member has not reported
as owned. A member cannot release them before it knows of them, so they can delay step 3. If the member reports exactly
what it keeps, the reply offers those of `pending_revocation` once more. The member takes them over and releases them
after that.

`undrained`: the partitions that the member has released, and whose offsets it has not committed up to what it was
served. They stay its own until it has committed, until the drain timeout, until it leaves, or until the target returns
them to it.

`moving`: the partitions that their owners must release or drain, usually for another member. An entry holds the two
members, the deadline of the drain and the offset to commit. In mode `ack` entries are only for reports. In mode `drain`
the entry of an `undrained` partition decides how long the new owner waits.

`unsettled`: the partitions that a member received while the group was a classic one, before their previous owner had
committed. The member owns them already, so only its OffsetFetch waits. If it releases one early, `unsettled._give_back`
makes that one `undrained` of the previous owner and `moving`.

The target is reached when every member is STABLE at the assignment epoch. By then no partition of the target is
`undrained` at another member. `unsettled` may outlast this moment: it holds back reading, not owning.
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
from gateway.coordinator.requests import Protocols
from gateway.coordinator.settings import ConsumerSettings
from protocol.errors import ErrorCode


class GroupState(Enum):
    """States of a consumer group, with upstream's names."""

    EMPTY = "Empty"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"
    DEAD = "Dead"


class MemberState(Enum):
    STABLE = "stable"
    UNREVOKED = "unrevoked_partitions"
    """The member must revoke partitions and has not acknowledged that it did."""
    UNRELEASED = "unreleased_partitions"
    """The member waits for partitions that another member has not released."""


@dataclass(frozen=True, slots=True)
class ClassicProtocol:
    """Contents of the last JoinGroup of a member that speaks the classic protocol."""

    session_timeout_ms: int
    protocols: Protocols
    """The member's first protocol is its group protocol. The others matter if the group becomes a classic one."""


@dataclass(frozen=True, slots=True)
class ConsumerMember:
    member_id: MemberId
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    principal: str | None = None
    """Principal of a member with a pattern, if there are ACLs. Otherwise None. Rows stored by a release without this
    field also have None: the pattern then shows everything until the member's next request."""
    rebalance_timeout_ms: int = -1
    """Time that the member may take to revoke partitions."""
    subscribed_topic_names: tuple[str, ...] = ()
    """Sorted, without duplicates."""
    subscribed_topic_regex: str = ""
    """Regular expression of the subscription. Empty if the member has none."""
    server_assignor: str | None = None
    member_epoch: int = 0
    previous_member_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: Partitions = field(default_factory=nothing)
    """Partitions that the coordinator has given to the member."""
    pending_revocation: Partitions = field(default_factory=nothing)
    """Partitions that the member must revoke, and may still own."""
    untaken: Partitions = field(default_factory=nothing)
    """Partitions of `assigned` or `pending_revocation` sent to the member since it last joined and not yet reported
    as owned."""
    is_to_take: bool = False
    """True if the last assignment sent to the member included the `untaken` partitions that it must then revoke."""
    undrained: Partitions = field(default_factory=nothing)
    """Partitions that the member has released, but not yet committed up to the last record that it was served. No
    other member may own them yet."""
    held_since: tuple[tuple[int, Partitions], ...] = field(default=(), metadata=VOLATILE)
    """Member epochs, each with the partitions of `assigned` and `pending_revocation` that the member was given at it
    (KIP-1251). Not stored: a partition that is missing here has been held since the present epoch, as far as commits
    are concerned."""
    classic: ClassicProtocol | None = None
    """Data of a classic member. None if the member uses the consumer protocol. A classic member's generation is its
    member epoch.
    """
    connection_number: int = field(default=-1, metadata=VOLATILE)
    """Number of the newest connection that sent a request of this member. Requests on older connections are out of
    date."""
    connection_id: ConnectionId | None = field(default=None, metadata=VOLATILE)
    """Id of the same connection. Records served on it were served to this member under any client id."""


def session_ms(member: ConsumerMember, settings: ConsumerSettings) -> int:
    """Return how long the member may be silent; a classic member chooses its own timeout."""
    return settings.session_timeout_ms if member.classic is None else member.classic.session_timeout_ms


Subscription = tuple[tuple[str, ...], str, tuple[str, str] | None]
"""Names, pattern, and the principal and host that the pattern is resolved for. Members with equal subscriptions
share everything derived from them."""

ReadAs = tuple[tuple[str, ...], str, Reader | None]
"""A subscription with one reader for all users that the ACLs do not distinguish. None: the pattern shows all that it
matches."""


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
    """All partitions that the member may own now. None if they are the same as in the last reply that listed them."""


# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConsumerGroupHeartbeat(ClientRequest[ConsumerGroupHeartbeatReply]):
    """A ConsumerGroupHeartbeat request. None and −1 mean "as before"; so does an absent `owned`."""

    connection_number: int
    """Rises with every connection that the node accepts, to distinguish a late request from a new one."""
    version: int
    client_id: str
    client_host: str
    new_member_id: MemberId
    """An unguessable id for a member of version 0 that sends none."""
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
    """None if there is no authorization."""


@dataclass(frozen=True, slots=True)
class Moving:
    """A partition that moves from one member to another."""

    source: MemberId
    target: MemberId | None
    """The new owner. None if it has left, or if the target gives the partition to no other member."""
    epoch: int
    """Group epoch at which the target assigned the partition to the new owner."""
    since_ms: int
    deadline_ms: int = 0
    """Time at which the partition is released even if it is not drained. Set when the source releases it, 0 before."""
    mark: int | None = None
    """The offset after the last record served to the source, if known."""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """A partition that was assigned to its owner while the group was a classic group, before its
    source had committed.
    """

    topic_id: UUID
    partition: int
    source: MemberId
    """The member that must still commit the records that it was served."""
    owner: MemberId
    """The member whose OffsetFetch returns no offset until the source has committed."""
    mark: int | None = field(default=None, metadata=VOLATILE)
    """The offset after the last record served to the source, if known."""
    since_ms: int = field(default=0, metadata=VOLATILE)
    deadline_ms: int = field(default=0, metadata=VOLATILE)


# --- the group ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConsumerGroup:
    """One consumer group at one moment. No mapping is ever mutated.

    Members, targets and epochs are stored. `owners`, `instances` and `subscriptions` follow from the members,
    `patterns` from the cluster's topics. Deadlines start anew when a coordinator reads the group back.
    """

    group_id: str = field(metadata=VOLATILE)
    exists: bool = field(default=False, metadata=VOLATILE)
    is_deleted: bool = field(default=False, metadata=VOLATILE)
    group_epoch: int = 0
    assignment_epoch: int = 0
    metadata_hash: int = 0
    """Hash of the subscribed topics when the group epoch was last decided."""
    assignor: str = ""
    """Name of the assignor that computed the target."""
    topics_revision: int = 0
    """Revision of the topics that the target was computed from. A coordinator that knows only older topics must not
    decide."""
    members: Mapping[MemberId, ConsumerMember] = field(
        default_factory=dict[MemberId, ConsumerMember], metadata=VOLATILE
    )
    target: Mapping[MemberId, Partitions] = field(default_factory=dict[MemberId, Partitions], metadata=VOLATILE)
    owners: Mapping[UUID, Mapping[int, MemberId]] = field(
        default_factory=dict[UUID, Mapping[int, MemberId]], metadata=VOLATILE
    )
    """The owner of each partition: the member that has it in `assigned`, `pending_revocation` or `undrained`."""
    instances: Mapping[str, MemberId] = field(default_factory=dict[str, MemberId], metadata=VOLATILE)
    """Static members by instance id."""
    subscriptions: Mapping[Subscription, int] = field(default_factory=dict[Subscription, int], metadata=VOLATILE)
    """For each subscription, the number of members with it."""
    patterns: Mapping[str, Pattern] = field(default_factory=dict[str, Pattern], metadata=VOLATILE)
    postponed: str = field(default="", metadata=VOLATILE)
    """A pattern that is resolved with the group's next request. Upstream resolves a pattern after the heartbeat that
    brings it, so its member first gets the topics that it names."""
    shown: Mapping[tuple[str, Reader], Shown] = field(
        default_factory=dict[tuple[str, Reader], Shown], metadata=VOLATILE
    )
    """For each pattern and each reader, the topics that the reader may see. Left out if the reader may see all."""
    seen: Cluster | None = field(default=None, compare=False, repr=False, metadata=VOLATILE)
    """The topics that `metadata_hash`, `patterns` and `shown` were last compared with; None before the first
    comparison."""
    unheard: frozenset[MemberId] = field(default=frozenset(), metadata=VOLATILE)
    """Members that have sent no request since a coordinator took the group over."""
    spread: Spread | None = field(default=None, compare=False, repr=False, metadata=VOLATILE)
    """How the target spreads partitions, if `uniform` computed it for members with equal subscriptions."""
    session_deadlines: Deadlines = field(default_factory=no_deadlines, metadata=VOLATILE)
    rebalance_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """Time by which each member in state UNREVOKED must have revoked its partitions."""
    moving: Mapping[tuple[UUID, int], Moving] = field(default_factory=dict[tuple[UUID, int], Moving], metadata=VOLATILE)
    """Partitions that their owners must release or drain before another member may have them."""
    unsettled: tuple[Unsettled, ...] = ()
    """Partitions whose owners got them in the classic group and may not fetch their offsets yet."""
    drain_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """Time at which the first undrained partition of each member is released in any case."""
    join_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """Time by which members of the classic protocol must rejoin after they were informed of a rebalance."""
    sync_deadlines: Mapping[MemberId, int] = field(default_factory=dict[MemberId, int], metadata=VOLATILE)
    """Time by which members of the classic protocol that have joined must fetch their assignment."""

    def with_session_deadline(self, member_id: MemberId, deadline_ms: int) -> ConsumerGroup:
        """Return the same group with one session deadline moved. A heartbeat without news does only this. Writing the
        slots costs half as much as the constructor of a frozen dataclass.
        """
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
    """Stored row of one member. An acknowledgement or a new target rewrites it."""

    member: ConsumerMember
    target: Partitions
