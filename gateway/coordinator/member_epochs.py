"""Code shared by the machines whose members have epochs: those of consumer, streams and share groups.

The one idea: such a group is its members, its epochs and a target, no matter what its members are assigned. So these
parts are alike: its membership, when it may be forgotten, how it is stored and deleted, how a step takes it apart and
puts it together, and the reply to a client that speaks another protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from gateway.coordinator.document import dump
from gateway.coordinator.facts import (
    AssignmentGiven,
    EveryoneHeard,
    Fact,
    GroupDeleted,
    MemberChanged,
    MemberId,
    MemberJoined,
    MemberLeft,
    MemberRejoined,
    RebalanceBegun,
    TargetComputed,
)
from gateway.coordinator.machine import GroupT, Replaceable, Reply, Request, Step, StoredGroup, Summary, Value
from gateway.coordinator.requests import (
    DeleteGroup,
    DeleteReply,
    Heartbeat,
    HeartbeatReply,
    LeaveGroup,
    LeaveReply,
    LeftMember,
    OffsetCommit,
    OffsetCommitReply,
    SyncGroup,
    SyncReply,
    TxnOffsetCommit,
)
from protocol.errors import ErrorCode

JOIN_EPOCH = 0
LEAVE_EPOCH = -1
STATIC_LEAVE_EPOCH = -2
"""Epoch by which a static member leaves but announces its return: it keeps its assignment while its session lasts."""

STABLE = "Stable"
"""State of every such group without a pending change, with upstream's name."""

FIRST_VERSION_WITH_MEMBER_EPOCH = 9
"""First version of OffsetCommit and OffsetFetch with a member epoch."""

UNRELEASED_INTERVAL_MS = 500
"""Heartbeat interval of a member that waits for partitions other members have not released. The coordinator cannot
push, so the member asks sooner."""

DURABLE: frozenset[type[Fact]] = frozenset(
    {
        AssignmentGiven,
        EveryoneHeard,
        GroupDeleted,
        MemberChanged,
        MemberJoined,
        MemberLeft,
        MemberRejoined,
        RebalanceBegun,
        TargetComputed,
    }
)
"""Facts that must be stored first: all but the purely informative ones, because an epoch already sent in a reply
must not be used again."""


class EpochMember(Protocol):
    """The fields of a member that all these machines use."""

    @property
    def member_epoch(self) -> int: ...


class EpochGroup(Value, Replaceable, Protocol):
    """The fields of a group that all these machines use."""

    @property
    def is_deleted(self) -> bool: ...

    @property
    def group_epoch(self) -> int: ...

    @property
    def assignment_epoch(self) -> int: ...

    @property
    def members(self) -> Mapping[MemberId, EpochMember]: ...

    @property
    def unheard(self) -> frozenset[MemberId]: ...


EpochGroupT = TypeVar("EpochGroupT", bound=EpochGroup)
EpochGroupT_contra = TypeVar("EpochGroupT_contra", bound=EpochGroup, contravariant=True)


def has_its_share(group: EpochGroup, member_id: MemberId, member_epoch: int) -> bool:
    """Return True if the sender with this epoch is a member that has received all of its share. Its heartbeat then
    changes nothing unless it carries something new."""
    member = group.members.get(member_id)
    return member is not None and member_epoch == member.member_epoch == group.assignment_epoch


class EpochMachine(Protocol[EpochGroupT_contra]):
    """The methods of `Machine` that all these machines share. A machine adds its types and its own methods."""

    group_type: str
    protocol_type: str

    def state_of(self, group: EpochGroupT_contra) -> str:
        """Return the state, with upstream's name."""
        ...

    def subscribed_topics(self, group: EpochGroupT_contra) -> frozenset[str] | None:
        """Return the topics that the members read, or None if they cannot be known."""
        ...

    def summary(self, group: EpochGroupT_contra) -> Summary:
        state = self.state_of(group)
        return Summary(
            group_id=group.group_id,
            group_type=self.group_type,
            exists=group.exists,
            state=state,
            protocol_type=self.protocol_type,
            generation_id=group.group_epoch,
            member_count=len(group.members),
            subscribed_topics=self.subscribed_topics(group),
            is_stable=state == STABLE,
        )

    def stored(self, group: EpochGroupT_contra) -> StoredGroup:
        """Return the stored form. `generation_id` is the group epoch; commits from outside are fenced by the
        condition that the group is Empty."""
        document = dump(group)
        del document["group_epoch"]
        return StoredGroup(
            state=self.state_of(group),
            protocol_type=self.protocol_type,
            generation_id=group.group_epoch,
            document=document,
            all_heard=not group.unheard,
        )

    def watches(self, group: EpochGroupT_contra) -> bool:
        return bool(group.members)

    def is_idle(self, group: EpochGroupT_contra) -> bool:
        return not group.members

    def is_deleted(self, group: EpochGroupT_contra) -> bool:
        return group.is_deleted

    def member_ids(self, group: EpochGroupT_contra) -> Sequence[MemberId]:
        return tuple(group.members)


class Fields(Generic[GroupT]):
    """The fields of one kind of group. A step copies them to a draft, and builds the group from the draft again."""

    def __init__(self, kind: type[GroupT]) -> None:
        self._kind: Any = kind
        self._names = tuple(each.name for each in fields(self._kind))
        self._values = attrgetter(*self._names)
        missing = self._kind("")
        self._mappings = tuple(name for name in self._names if type(getattr(missing, name)) is dict)
        self._sets = tuple(name for name in self._names if type(getattr(missing, name)) is frozenset)

    def of(self, group: GroupT) -> dict[str, Any]:
        """Return the fields by name; mappings and sets as copies that may be changed. The group exists from here on."""
        own = dict(zip(self._names, self._values(group), strict=True))
        for name in self._mappings:
            own[name] = dict(own[name])
        for name in self._sets:
            own[name] = set(own[name])
        own["exists"] = True
        return own

    def together(self, own: Mapping[str, Any]) -> GroupT:
        """Return the group made of these fields. Other entries are ignored."""
        values = {name: own[name] for name in self._names}
        for name in self._sets:
            values[name] = frozenset(values[name])
        return self._kind(**values)


def refuse(event: Request[Reply], error: ErrorCode) -> OffsetCommitReply | DeleteReply:
    """Return a reply that contains only `error` to a request that groups of every type accept."""
    match event:
        case OffsetCommit() | TxnOffsetCommit():
            return OffsetCommitReply(error)
        case DeleteGroup():
            return DeleteReply(error)
        case _:
            raise TypeError(f"{type(event).__name__} is no request of a group whose members have epochs")


def delete(group: EpochGroupT, event: DeleteGroup) -> Step[EpochGroupT]:
    if group.members:
        return Step(group, ((event.request_id, DeleteReply(ErrorCode.NON_EMPTY_GROUP)),))
    deleted = replace(group, is_deleted=True)
    return Step(deleted, ((event.request_id, DeleteReply(ErrorCode.NONE)),), (GroupDeleted(),))


CLASSIC_REQUESTS_OF_MEMBERS = frozenset[type]({Heartbeat, SyncGroup, LeaveGroup})


def no_classic_member(group: GroupT, event: Request[Reply]) -> Step[GroupT]:
    """Refuse a request of the classic protocol in a group without classic members: UNKNOWN_MEMBER_ID."""
    unknown = ErrorCode.UNKNOWN_MEMBER_ID
    reply: HeartbeatReply | SyncReply | LeaveReply
    match event:
        case Heartbeat():
            reply = HeartbeatReply(unknown)
        case SyncGroup():
            reply = SyncReply(unknown)
        case LeaveGroup():
            left = (LeftMember(each.member_id, each.group_instance_id, unknown) for each in event.members)
            reply = LeaveReply(ErrorCode.NONE, tuple(left))
        case _:
            raise TypeError(f"{type(event).__name__} is no request of a classic member")
    return Step(group, ((event.request_id, reply),))
