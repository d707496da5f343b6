"""The interface of a machine: the pure protocol of one kind of group, as the runner plays it.

The one idea: the runner (`gateway/groups/runtime.py`) knows load, step, store, reply and unload, and nothing else.
Every difference between classic groups, consumer groups and later kinds is behind `Machine`: the value, the events that
it accepts, the replies that it gives, which facts must be stored first, and the contents of its rows. `Machines` finds
the machine by the types of the value and the event. So a group id may continue under another machine (`adopt`), and the
runner does not notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, replace
from typing import Any, ClassVar, Generic, NewType, Protocol, TypeVar, cast

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.facts import Conversion, Fact, GroupTypeChanged, MemberId
from protocol.errors import ErrorCode

RequestId = NewType("RequestId", int)
"""Id of one request that must receive exactly one reply. The runner maps it to the connection that sent the request."""

ConnectionId = NewType("ConnectionId", str)

Document = Mapping[str, object]
"""The part of a stored value that Postgres need not understand: JSON (`document.py`)."""


class Value(Protocol):
    """A machine's group: a frozen value of a type that no other machine uses."""

    @property
    def group_id(self) -> str: ...

    @property
    def exists(self) -> bool:
        """False if the id was never used."""
        ...

    @property
    def members(self) -> Mapping[MemberId, object]: ...


GroupT = TypeVar("GroupT", bound=Value)
GroupT_co = TypeVar("GroupT_co", bound=Value, covariant=True)
SettingsT = TypeVar("SettingsT")
SettingsT_contra = TypeVar("SettingsT_contra", contravariant=True)


# --- events ---------------------------------------------------------------------------------------------------------


class Reply(Protocol):
    @property
    def error(self) -> ErrorCode: ...


ReplyT = TypeVar("ReplyT", bound=Reply)
ReplyT_co = TypeVar("ReplyT_co", bound=Reply, covariant=True)


@dataclass(frozen=True, slots=True)
class Request(Generic[ReplyT_co]):
    """An event with a waiting sender: it gets exactly one reply, now or in a later step."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ClientRequest(Request[ReplyT_co]):
    """A request on behalf of a member. The group receives ConnectionClosed when its connection closes."""

    connection_id: ConnectionId


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The peer closed or lost a connection; its parked requests can no longer be answered."""

    connection_id: ConnectionId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: due deadlines fire. Sent at `next_deadline(group)` or later; late ones are harmless."""


@dataclass(frozen=True, slots=True)
class ClusterChanged:
    """Topics were created or deleted, or gained partitions. Sent if the machine `watches` the cluster."""


@dataclass(frozen=True, slots=True)
class News:
    """An event without a waiting sender, of a kind that only some machines know."""


Event = Request[Reply] | ConnectionClosed | Tick | ClusterChanged | News

MANY = 1_000
"""Topics, partitions or tasks: examining this many takes some milliseconds."""
LONG_BYTES = 32 * 1024
"""Size of embedded subscriptions or assignments: some thousand topics or partitions."""


# --- a step ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step(Generic[GroupT_co]):
    """The result of one event. If one of `facts` is durable, the group is stored before any reply is sent. If
    storing fails, the runner keeps the previous group or reads it again, so a refused step has changed nothing."""

    group: GroupT_co
    replies: tuple[tuple[RequestId, Reply], ...] = ()
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class Adopted(Generic[GroupT_co]):
    """Another machine's group converted to this machine, the replies to the requests it had parked, and the facts
    about it."""

    group: GroupT_co
    conversion: Conversion
    replies: tuple[tuple[RequestId, Reply], ...] = ()
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class NotAdopted:
    """The reason why another machine's group may not be converted."""

    reply: Reply
    """The reply to the request that would have converted the group."""


# --- what is stored -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredMember:
    """A stored member. `member_epoch` fences offset commits that name this member; 0 if the group's generation
    fences them."""

    document: Document
    member_epoch: int = 0


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A stored group without its members. Fields that Postgres must understand have names here; the rest is the
    machine's own."""

    state: str
    protocol_type: str | None
    generation_id: int
    """Classic generation or group epoch. It fences commits that name no member epoch."""
    document: Document
    all_heard: bool = True
    """True if every member has sent a request since the group was taken over, so that sessions have their full length
    again.
    """
    clock_lead_ms: int | None = None
    """How far the reader's clock is ahead of the clock that dated the document, which belonged to another node or an
    earlier process. None: the document does not say."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Facts about a group of any type that every caller may ask for."""

    group_id: str
    group_type: str
    exists: bool
    """False if the id was never used."""
    state: str
    protocol_type: str
    """The group's protocol type. Empty if it has none."""
    generation_id: int
    member_count: int
    subscribed_topics: frozenset[str] | None
    """Topics that the group's members read; None if they cannot be known."""
    is_stable: bool
    """True if no change of owners is pending."""


class Machine(Protocol[GroupT, SettingsT_contra]):
    group_class: type[GroupT]
    """Type of the machine's group values. No other machine uses this type."""
    group_type: str
    """The type's name in storage and in ListGroups."""
    events: frozenset[type]
    """The requests that this machine accepts. If several machines accept one, it goes to the machine that the group
    has."""
    beats: frozenset[type]
    """The requests that, if they yield no fact, only postpone a deadline. No timer needs to be set earlier after
    them."""
    durable: frozenset[type[Fact]]

    def missing(self, group_id: str) -> GroupT:
        """Return the group of an id that was never used."""
        ...

    def takes(self, group: GroupT, event: Request[Reply]) -> bool:
        """True if this machine answers the request of another machine itself, because its group has members of that
        protocol."""
        ...

    def adopt(
        self, group: Value, event: Request[Reply], cluster: Cluster, now_ms: int, settings: SettingsT_contra
    ) -> Adopted[GroupT] | NotAdopted | None:
        """Convert another machine's group, if `event`, which belongs to this machine, permits that. Return None if
        the only answer is that the group is of another kind."""
        ...

    def step(
        self, group: GroupT, event: Event, cluster: Cluster, now_ms: int, settings: SettingsT_contra
    ) -> Step[Value]:
        """Apply `event` at `now_ms`. If the event is refused or changes nothing, the step holds the same object. The
        new value may belong to another machine; then the step emits `GroupTypeChanged`."""
        ...

    def is_long(self, group: Value, event: Event, cluster: Cluster) -> bool:
        """True if the step may take more than a few milliseconds because it examines very many topics, partitions or
        tasks. The group may belong to another machine and be about to be converted by `adopt`."""
        ...

    def refuse(self, event: Request[Reply], error: ErrorCode, *, loading: bool = False) -> Reply:
        """Return a reply that contains only `error`. `loading` means that the group could not be read, so that its
        state is unknown.
        """
        ...

    def next_deadline(self, group: GroupT) -> int | None: ...

    def postponed(self, group: GroupT, by_ms: int) -> GroupT:
        """Return the group with every deadline later, because the group was being stored or the node did not run."""
        ...

    def watches(self, group: GroupT) -> bool:
        """True if the group must receive ClusterChanged."""
        ...

    def is_idle(self, group: GroupT) -> bool:
        """True if the whole group is stored in Postgres, so that it may be dropped from memory."""
        ...

    def is_deleted(self, group: GroupT) -> bool: ...

    def summary(self, group: GroupT) -> Summary: ...

    def stored(self, group: GroupT) -> StoredGroup: ...

    def stored_member(self, group: GroupT, member_id: MemberId) -> StoredMember | None:
        """Return the stored form of the member, or None if it does not exist."""
        ...

    def member_ids(self, group: GroupT) -> Sequence[MemberId]: ...

    def connection_numbers(self, group: GroupT) -> Mapping[MemberId, int]:
        """Return the newest connection by which each member has spoken to this node. Not stored: the numbers mean
        nothing to another node or after a restart."""
        ...

    def with_connection_numbers(self, group: GroupT, numbers: Mapping[MemberId, int]) -> GroupT:
        """Return a group that was just read, with the connection numbers that this node knew before. Members may
        have changed."""
        ...

    def restore(
        self,
        group_id: str,
        stored: StoredGroup,
        members: Mapping[MemberId, Document],
        silent_ms: int | None,
        now_ms: int,
        settings: SettingsT_contra,
    ) -> GroupT:
        """Build the group for a coordinator that has just started. `silent_ms`: how long ago a coordinator started
        that has not heard from all members since; None: the last one had."""
        ...


class Replaceable(Protocol):
    """A dataclass that `replace` can copy with changes."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class ConnectedMember(Replaceable, Protocol):
    """A member whose connections are counted, because a late request on an older one could do harm."""

    @property
    def connection_number(self) -> int: ...


class ConnectedGroup(Value, Replaceable, Protocol):
    @property
    def members(self) -> Mapping[MemberId, ConnectedMember]: ...


ConnectedGroupT = TypeVar("ConnectedGroupT", bound=ConnectedGroup)


class ConnectedMachine(Generic[ConnectedGroupT]):
    """The methods of `Machine` that are the same for all groups that count the connections of their members."""

    def connection_numbers(self, group: ConnectedGroupT) -> Mapping[MemberId, int]:
        return {key: each.connection_number for key, each in group.members.items() if each.connection_number >= 0}

    def with_connection_numbers(self, group: ConnectedGroupT, numbers: Mapping[MemberId, int]) -> ConnectedGroupT:
        members = {
            key: replace(each, connection_number=max(each.connection_number, numbers.get(key, -1)))
            for key, each in group.members.items()
        }
        return replace(group, members=members)


class Machines(Generic[GroupT, SettingsT]):
    """The machines that may play one kind of id. The first one plays ids that were never used."""

    def __init__(self, *machines: Machine[Any, SettingsT]) -> None:
        self._by_value = {machine.group_class: machine for machine in machines}
        """A group finds the machine of its own type here, so the types of the two agree."""
        self._by_event: dict[type, Machine[Any, SettingsT]] = {}
        for machine in machines:
            for event in machine.events:
                self._by_event.setdefault(event, machine)
        self._by_group_type = {machine.group_type: machine for machine in machines}
        self._first = machines[0]

    def of(self, group: GroupT) -> Machine[GroupT, SettingsT]:
        return self._by_value[type(group)]

    def of_type(self, group_type: str) -> Machine[GroupT, SettingsT]:
        return self._by_group_type[group_type]

    def missing(self, group_id: str) -> GroupT:
        return self._first.missing(group_id)

    def refuse(self, event: Request[ReplyT], error: ErrorCode, *, loading: bool = False) -> ReplyT:
        """Return a reply that contains only `error`, of the type that the request declares."""
        return cast(ReplyT, self._by_event[type(event)].refuse(event, error, loading=loading))

    def step(self, group: GroupT, event: Event, cluster: Cluster, now_ms: int, settings: SettingsT) -> Step[GroupT]:
        """Let the group's machine play the event. If the request belongs to another machine, that machine plays it
        if it can convert the group. If it cannot, or refuses the request, the group does not change."""
        machine = self._by_value[type(group)]
        if type(event) in machine.events or not isinstance(event, Request) or machine.takes(group, event):
            return cast("Step[GroupT]", machine.step(group, event, cluster, now_ms, settings))
        other = self._by_event[type(event)]
        adopted = other.adopt(group, event, cluster, now_ms, settings)
        if not isinstance(adopted, Adopted):
            refused = other.refuse(event, ErrorCode.INCONSISTENT_GROUP_PROTOCOL) if adopted is None else adopted.reply
            return Step(group, ((event.request_id, refused),))
        taken = other.step(adopted.group, event, cluster, now_ms, settings)
        if taken.group is adopted.group:
            return Step(group, taken.replies)
        changed = GroupTypeChanged(machine.group_type, other.group_type, adopted.conversion)
        replies = (*adopted.replies, *taken.replies)
        return Step(cast(GroupT, taken.group), replies, (changed, *adopted.facts, *taken.facts))

    def is_long(self, group: GroupT, event: Event, cluster: Cluster) -> bool:
        """True if the runner should execute the step where it does not delay other steps."""
        machine = self._by_value[type(group)]
        if machine.is_long(group, event, cluster):
            return True
        if not isinstance(event, Request) or type(event) in machine.events:
            return False
        return self._by_event[type(event)].is_long(group, event, cluster)

    def must_store(self, taken: Step[GroupT]) -> bool:
        """True if part of the step must be in Postgres before its replies leave."""
        if not taken.facts:
            return False
        durable = self.of(taken.group).durable
        return any(type(fact) in durable or type(fact) is GroupTypeChanged for fact in taken.facts)
