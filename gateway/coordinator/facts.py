"""Typed values for what happened to a group: the facts that a step emits besides its replies.

The one idea: a machine emits each fact once, and every listener reads it there. Storage writes the rows of the members
that facts touch, the log prints `str(fact)`, metrics count by type. A machine declares which of its facts must be in
Postgres before any reply leaves (`Machine.durable`), because the same fact may bind one machine and not another. For
example, a member that waits in a classic group's join phase is not stored, and a member of a consumer group is.

A fact names its member by id, and its reason by an enum of its own or in the client's words. It holds no group, member
or assignment, so it is small and can be kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType
from uuid import UUID

MemberId = NewType("MemberId", str)

MAX_NAMED = 10
"""Maximal number of members and partitions that one fact names."""
MAX_REASON_CHARS = 255
"""Clients cut the reasons that they send to this length (KIP-800); longer reasons are cut here."""


class Departure(Enum):
    """The reason why a member left the group."""

    LEFT = "left"
    SESSION_EXPIRED = "was not heard within its session"
    CONNECTION_CLOSED = "did not come back after its connection closed"
    NOT_REJOINED = "did not re-join in time"
    NEVER_SYNCED = "never synced"
    TURNED_AWAY = "was turned away: group.max.size is reached"
    NOT_REVOKED = "did not let go of its partitions in time"


class Trigger(Enum):
    """The reason why a rebalance began."""

    MEMBER_JOINED = "a member joined"
    MEMBER_REJOINED = "a member re-joined"
    MEMBER_RETURNED = "a static member returned"
    MEMBER_LEFT = "a member left"
    TOO_MANY_MEMBERS = "there are more members than group.max.size"
    TOPICS_CHANGED = "subscribed topics changed"
    SUBSCRIPTION_CHANGED = "a member changed its subscription"
    GUARDED = "partitions were withheld because another member claimed them"
    MIGRATED = "the last member of the consumer protocol has gone: members of the classic one go on by themselves"


class Conversion(Enum):
    """The reason why another machine takes over an id."""

    EMPTY = "it had no members"
    UPGRADE = "a member of the consumer protocol joined"
    DOWNGRADE = "its last member of the consumer protocol has gone"


class Violation(Enum):
    """How members of protocol type `consumer` and their leader deviate from KIP-429 and from what assignors promise."""

    UNREADABLE_SUBSCRIPTION = "a subscription cannot be read"
    UNREADABLE_ASSIGNMENT = "an assignment cannot be read"
    DOUBLE_CLAIM = "partitions are claimed by several members at the same generation"
    STALE_CLAIM = "partitions are claimed from an older generation"
    UNDELIVERED_CLAIM = "partitions are claimed that were not delivered to the member"
    DELIVERED_UNCLAIMED = "partitions that were delivered are not claimed"
    NOTHING_TAKEN = "a member claims nothing of what it was delivered: its rebalance callback may misuse assign"
    NOTHING_READ = (
        "a member reads nothing of what it was assigned, nor asks where to begin: its rebalance callback misuses "
        "assign where a cooperative protocol needs incremental_assign, or is stuck"
    )
    MOVED_WHILE_CLAIMED = "the leader moves partitions that another member still claims"
    ASSIGNED_TWICE = "the leader gives partitions to several members"
    UNKNOWN_MEMBER = "the leader assigns to somebody who is no member"
    NOT_SUBSCRIBED = "the leader gives partitions of topics that the member does not read"
    NO_SUCH_PARTITION = "the leader gives partitions that do not exist"
    ORPHANED = "partitions are nobody's for several generations"
    MIXED_MODE = "the chosen protocol is eager while members also offer a cooperative one"
    MODE_CHANGED = "the group went from eager to cooperative, or back, with members in it"
    CHURN = "the same members rebalance again and again; static membership may help"


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that happened. `touches` names the members whose stored form may have been created, changed or
    removed."""

    def touches(self) -> tuple[MemberId, ...]:
        return ()


# --- members --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberFact(Fact):
    """Something that happened to one member."""

    member_id: MemberId

    def touches(self) -> tuple[MemberId, ...]:
        return (self.member_id,)


@dataclass(frozen=True, slots=True)
class MemberJoined(MemberFact):
    group_instance_id: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        return _because(f"new member {self.member_id}", self.reason)


@dataclass(frozen=True, slots=True)
class MemberRejoined(MemberFact):
    """A member joined again: with other metadata, as the leader that wants to assign anew, or because the group
    asked it to. In the classic protocol it waits until all members have joined."""

    reason: str | None = None

    def __str__(self) -> str:
        return _because(f"member {self.member_id} re-joined", self.reason)


@dataclass(frozen=True, slots=True)
class MemberLeft(MemberFact):
    departure: Departure
    reason: str | None = None

    def __str__(self) -> str:
        return _because(f"member {self.member_id} {self.departure.value}", self.reason)


@dataclass(frozen=True, slots=True)
class MemberReplaced(MemberFact):
    """A static member returned as `member_id` and replaces `former_id`."""

    former_id: MemberId
    group_instance_id: str
    reason: str | None = None

    def touches(self) -> tuple[MemberId, ...]:
        return (self.member_id, self.former_id)

    def __str__(self) -> str:
        return _because(f"static member {self.group_instance_id} returned as {self.member_id}", self.reason)


@dataclass(frozen=True, slots=True)
class MemberAway(MemberFact):
    """A static member left for a while. Its partitions or tasks wait for it during its session."""

    def __str__(self) -> str:
        return f"static member {self.member_id} left for a while"


@dataclass(frozen=True, slots=True)
class MemberChanged(MemberFact):
    """The stored form of the member changed in a way that no other fact describes: its client, rack or timeout, or
    the partitions that it reports as owned."""

    def __str__(self) -> str:
        return f"member {self.member_id} changed"


@dataclass(frozen=True, slots=True)
class MemberSilent(Fact):
    """A member spoke so late that it has missed a heartbeat. This has no consequences."""

    member_id: MemberId
    silent_ms: int

    def __str__(self) -> str:
        return f"member {self.member_id} said nothing for {self.silent_ms} ms"


@dataclass(frozen=True, slots=True)
class MemberFenced(Fact):
    """Requests as `member_id` are refused from now on: another process has its instance id or its epoch."""

    member_id: MemberId
    group_instance_id: str | None = None

    def __str__(self) -> str:
        return f"member {self.member_id} is fenced"


@dataclass(frozen=True, slots=True)
class MemberDisconnected(Fact):
    """The member's connection closed. The member may return on another one during the grace period."""

    member_id: MemberId

    def __str__(self) -> str:
        return f"member {self.member_id}: connection closed"


@dataclass(frozen=True, slots=True)
class PendingMemberExpired(Fact):
    """An id that was handed out (KIP-394) was not used in time."""

    member_id: MemberId

    def __str__(self) -> str:
        return f"pending member {self.member_id} never joined"


@dataclass(frozen=True, slots=True)
class AssignmentGiven(MemberFact):
    """The member's assignment was decided: by the leader in generation `epoch`, or by the group at that epoch."""

    epoch: int

    def __str__(self) -> str:
        return f"member {self.member_id} assigned at {self.epoch}"


@dataclass(frozen=True, slots=True)
class MemberSynced(Fact):
    """A member of a classic group receives its assignment for the first time in this generation."""

    member_id: MemberId

    def __str__(self) -> str:
        return f"member {self.member_id} synced"


# --- the group ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RebalanceBegun(Fact):
    trigger: Trigger
    member_id: MemberId | None = None
    """The member that caused the rebalance, if a single member did."""

    def __str__(self) -> str:
        return f"rebalance: {self.trigger.value}" + (f" ({self.member_id})" if self.member_id else "")


@dataclass(frozen=True, slots=True)
class GenerationStarted(Fact):
    """A join phase ended. All assignments of the previous generation are void. Without members the group is empty."""

    generation_id: int
    protocol_name: str | None
    members: tuple[MemberId, ...]

    def touches(self) -> tuple[MemberId, ...]:
        return self.members

    def __str__(self) -> str:
        if not self.members:
            return f"generation {self.generation_id} is empty"
        return f"generation {self.generation_id} of {len(self.members)} members, protocol {self.protocol_name}"


@dataclass(frozen=True, slots=True)
class GenerationAssigned(Fact):
    """The leader's assignments arrived; each member's own is an `AssignmentGiven`."""

    generation_id: int
    leader_id: MemberId

    def __str__(self) -> str:
        return f"generation {self.generation_id} assigned by {self.leader_id}"


@dataclass(frozen=True, slots=True)
class TargetComputed(Fact):
    """The target assignment of a consumer group was computed again, at `epoch`."""

    epoch: int
    assignor: str
    members: tuple[MemberId, ...]
    """Members whose share changed."""

    def touches(self) -> tuple[MemberId, ...]:
        return self.members

    def __str__(self) -> str:
        return f"target {self.epoch} computed by {self.assignor}, {len(self.members)} share(s) changed"


@dataclass(frozen=True, slots=True)
class EveryoneHeard(Fact):
    """Every member has spoken or left since a coordinator took the group over."""

    def __str__(self) -> str:
        return "all members were heard since the restart"


@dataclass(frozen=True, slots=True)
class GroupTypeChanged(Fact):
    """Another machine handles this id from now on. Every member is stored again."""

    before: str
    after: str
    conversion: Conversion = Conversion.EMPTY

    def __str__(self) -> str:
        return f"{self.before} group became a {self.after} group: {self.conversion.value}"


@dataclass(frozen=True, slots=True)
class GroupDeleted(Fact):
    def __str__(self) -> str:
        return "group deleted"


@dataclass(frozen=True, slots=True)
class ProtocolViolated(Fact):
    """The observer has seen a violation. Its only possible consequence is `PartitionsWithheld`. At most `MAX_NAMED`
    members and partitions are named; the counts include all."""

    violation: Violation
    generation_id: int
    members: tuple[MemberId, ...]
    member_count: int
    partitions: tuple[tuple[str, int], ...] = ()
    partition_count: int = 0

    def __str__(self) -> str:
        return f"{self.violation.value}: {_named(self.members, self.member_count)}" + _of(
            self.partitions, self.partition_count
        )


@dataclass(frozen=True, slots=True)
class PartitionsWithheld(Fact):
    """`group.cooperative.guard`: partitions were removed from the leader's assignment because other members still
    claim them."""

    generation_id: int
    members: tuple[MemberId, ...]
    member_count: int
    partitions: tuple[tuple[str, int], ...]
    partition_count: int

    def __str__(self) -> str:
        return f"withheld from {_named(self.members, self.member_count)}" + _of(self.partitions, self.partition_count)


@dataclass(frozen=True, slots=True)
class OffsetsCommitted(Fact):
    """Offsets are durable. The writer of the offsets emits this, because offsets do not pass through a step."""

    member_id: MemberId
    epoch: int
    """The generation or member epoch under which they were committed; −1 for a simple consumer or an administrator."""
    offsets: tuple[tuple[UUID, int, int], ...]
    """(topic id, partition, committed offset)."""

    def __str__(self) -> str:
        return f"{self.member_id or 'an admin'} committed {len(self.offsets)} offset(s)"


@dataclass(frozen=True, slots=True)
class TransactionCommitted(Fact):
    """Offsets of the group became durable with a transaction. The node that ended it emits this, and does not know
    which offsets."""

    def __str__(self) -> str:
        return "a transaction committed offsets"


def shortened(reason: str | None) -> str | None:
    return None if reason is None else reason[:MAX_REASON_CHARS]


def _because(what: str, reason: str | None) -> str:
    """Add the client's own reason (KIP-800), which means nothing to the protocol."""
    return f"{what}: {reason}" if reason else what


def _named(members: tuple[MemberId, ...], count: int) -> str:
    return ", ".join(members) + (f" and {count - len(members)} more" if count > len(members) else "")


def _of(partitions: tuple[tuple[str, int], ...], count: int) -> str:
    if not partitions:
        return ""
    more = f" and {count - len(partitions)} more" if count > len(partitions) else ""
    return f" ({', '.join(f'{topic}-{partition}' for topic, partition in partitions)}{more})"
