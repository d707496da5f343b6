"""Code shared by the machines whose members have epochs: those of consumer, streams and share groups.

The one idea: such a group is its members, its epochs and a target, no matter what its members are assigned. So these
parts are alike: its membership, when it may be forgotten, how it is stored and deleted, how a step takes it apart and
puts it together, and the reply to a client that speaks another protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, replace
from operator import attrgetter
from typing import Any, ClassVar, Generic, Protocol, TypeVar

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
from gateway.coordinator.machine import GroupT, Reply, Request, Step, StoredGroup, Value
from gateway.coordinator.requests import (
    DeleteGroup,
    DeleteReply,
    Heartbeat,
    HeartbeatReply,
    LeaveGroup,
    LeaveReply,
    LeftMember,
    SyncGroup,
    SyncReply,
)
from protocol.errors import ErrorCode

JOIN_EPOCH = 0
LEAVE_EPOCH = -1
STATIC_LEAVE_EPOCH = -2
"""Epoch by which a static member leaves but announces its return: it keeps its assignment while its session lasts."""

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


class _Replaceable(Protocol):
    """A dataclass that `replace` can copy with changes."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class EpochMember(_Replaceable, Protocol):
    """The part of a member that is alike."""

    @property
    def member_epoch(self) -> int: ...


class EpochGroup(Value, _Replaceable, Protocol):
    """The part of a group that is alike."""

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


class ConnectedMember(EpochMember, Protocol):
    """A member whose connections are counted, because a late request on an older one could do harm."""

    @property
    def connection_number(self) -> int: ...


class ConnectedGroup(EpochGroup, Protocol):
    @property
    def members(self) -> Mapping[MemberId, ConnectedMember]: ...


EpochGroupT = TypeVar("EpochGroupT", bound=EpochGroup)
ConnectedGroupT = TypeVar("ConnectedGroupT", bound=ConnectedGroup)


def has_its_share(group: EpochGroup, member_id: MemberId, member_epoch: int) -> bool:
    """Return True if the sender with this epoch is a member that has received all of its share. Its heartbeat then
    changes nothing unless it carries something new."""
    member = group.members.get(member_id)
    return member is not None and member_epoch == member.member_epoch == group.assignment_epoch


class EpochMachine(Generic[EpochGroupT]):
    """The part of `Machine` that is alike."""

    def watches(self, group: EpochGroupT) -> bool:
        return bool(group.members)

    def is_idle(self, group: EpochGroupT) -> bool:
        return not group.members

    def is_deleted(self, group: EpochGroupT) -> bool:
        return group.is_deleted

    def member_ids(self, group: EpochGroupT) -> Sequence[MemberId]:
        return tuple(group.members)


class ConnectedMachine(EpochMachine[ConnectedGroupT]):
    """`EpochMachine` for groups that count the connections of their members."""

    def connection_numbers(self, group: ConnectedGroupT) -> Mapping[MemberId, int]:
        return {key: each.connection_number for key, each in group.members.items() if each.connection_number >= 0}

    def with_connection_numbers(self, group: ConnectedGroupT, numbers: Mapping[MemberId, int]) -> ConnectedGroupT:
        members = {
            key: replace(each, connection_number=max(each.connection_number, numbers.get(key, -1)))
            for key, each in group.members.items()
        }
        return replace(group, members=members)


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
        """Return the group made of these fields; other entries are ignored."""
        values = {name: own[name] for name in self._names}
        for name in self._sets:
            values[name] = frozenset(values[name])
        return self._kind(**values)


def stored(group: EpochGroup, state: str, protocol_type: str) -> StoredGroup:
    """Return the stored form. `generation_id` is the group epoch; commits from outside are fenced by the condition
    that the group is Empty."""
    document = dump(group)
    del document["group_epoch"]
    return StoredGroup(
        state=state,
        protocol_type=protocol_type,
        generation_id=group.group_epoch,
        document=document,
        all_heard=not group.unheard,
    )


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
