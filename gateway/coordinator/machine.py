"""What a machine is: the pure protocol of one kind of group, as the runner plays it.

The one idea: the runner (`gateway/groups/runtime.py`) knows load, step, store, reply and unload, and nothing else. All
that differs between classic groups, consumer groups and whatever comes is behind `Machine`: the value, the events that
it takes, the replies that it gives, which facts must be stored first, what its rows hold. `Machines` finds the machine
by the value's type and the event's, so one id may go on under another machine (`adopt`) without the runner's noticing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NewType, Protocol, TypeVar

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.facts import Conversion, Fact, GroupTypeChanged, MemberId
from protocol.errors import ErrorCode

RequestId = NewType("RequestId", int)
"""Names one request that awaits exactly one reply; the runner's key to the connection that sent it."""

ConnectionId = NewType("ConnectionId", str)

Value = Any
"""A machine's group: a frozen value, of a type that no other machine has."""

Document = Mapping[str, Any]
"""What is stored of a value that Postgres need not understand: JSON (`document.py`)."""


# --- events ---------------------------------------------------------------------------------------------------------


class Reply(Protocol):
    @property
    def error(self) -> ErrorCode: ...


ReplyT = TypeVar("ReplyT", bound=Reply)


@dataclass(frozen=True, slots=True)
class Request(Generic[ReplyT]):
    """An event that someone waits for: it gets exactly one reply, now or in a later step."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ClientRequest(Request[ReplyT]):
    """A request that speaks for a member: the group is told when its connection closes."""

    connection_id: ConnectionId


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """The peer closed (or lost) a connection; its parked requests can no longer be answered."""

    connection_id: ConnectionId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: due deadlines fire. Sent at `next_deadline(group)` or later; late ones are harmless."""


@dataclass(frozen=True, slots=True)
class ClusterChanged:
    """Topics came, went or grew. Sent where the machine `watches` the cluster."""


@dataclass(frozen=True, slots=True)
class News:
    """An event that nobody waits for, of a kind that only some machines know."""


Event = Request[Any] | ConnectionClosed | Tick | ClusterChanged | News

MANY = 1_000
"""Topics, partitions or tasks: a look at so many takes some milliseconds."""
LONG_BYTES = 32 * 1024
"""Of embedded subscriptions or assignments: some thousand topics or partitions."""


# --- a step ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """What one event did. If one of `facts` is durable, the group is stored before any reply is sent; if storing fails
    the runner keeps the group it had or reads it again, so a refused step has changed nothing."""

    group: Value
    replies: tuple[tuple[RequestId, Any], ...] = ()
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class Adopted:
    """Another machine's group as one's own, what those are answered whose requests it held, and what became of that."""

    group: Value
    conversion: Conversion
    replies: tuple[tuple[RequestId, Any], ...] = ()
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class NotAdopted:
    """Why another machine's group may not go on as one's own."""

    reply: Any
    """What the request is answered that would have made it so."""


# --- what is stored -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredMember:
    """`member_epoch` fences offset commits that name this member; 0 where the group's generation does."""

    document: Document
    member_epoch: int = 0


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group but for its members: what Postgres must understand has a name here, the rest is the machine's own."""

    state: str
    protocol_type: str | None
    generation_id: int
    """Classic generation or group epoch: what commits are fenced by that name no member epoch."""
    document: Document
    all_heard: bool = True
    """Nobody is still to be heard from since the group was taken over: its sessions have their full length again."""
    clock_lead_ms: int | None = None
    """Of a group that is read: how far the reader's clock is ahead of the one that times in the document are by, which
    is another node's, or was before a restart. None: nobody said so when it was stored."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What anyone may ask of a group, whatever its type."""

    group_id: str
    group_type: str
    exists: bool
    """False: an id that nobody has used."""
    state: str
    protocol_type: str
    """"" if it has none."""
    generation_id: int
    member_count: int
    subscribed_topics: frozenset[str] | None
    """Topics that its members read; None where that cannot be known."""
    is_stable: bool
    """Nothing about who reads what is about to change."""


class Machine(Protocol):
    group_type: str
    """As stored, and as ListGroups shows it."""
    events: frozenset[type]
    """The requests that this machine takes. One that several take goes to the machine that the group has."""
    beats: frozenset[type]
    """Those of them that, without a fact, at most put a deadline off: no timer need be set earlier after them."""
    durable: frozenset[type[Fact]]

    def missing(self, group_id: str) -> Value:
        """The group of an id that nobody has used."""
        ...

    def takes(self, group: Value, event: Any) -> bool:
        """Whether it answers this request of another machine's itself: its group has members that speak like that."""
        ...

    def adopt(
        self, group: Value, event: Any, cluster: Cluster, now_ms: int, settings: Any
    ) -> Adopted | NotAdopted | None:
        """Another machine's group as one of this machine's, if `event`, which is this machine's, may make it so; None
        where all there is to say is that the group is of another kind."""
        ...

    def step(self, group: Value, event: Any, cluster: Cluster, now_ms: int, settings: Any) -> Step:
        """What `event` does at `now_ms`. An event that is refused, or changes nothing, gives back the same object. The
        value may be another machine's from here on; then the step tells `GroupTypeChanged`."""
        ...

    def is_long(self, group: Value, event: Any, cluster: Cluster) -> bool:
        """Whether the step may take more than a few milliseconds: it looks at very many topics, partitions or tasks.
        The group may be another machine's, which `adopt` is to be asked about."""
        ...

    def refuse(self, event: Any, error: ErrorCode, *, loading: bool = False) -> Any:
        """The reply that says only `error`; `loading`: the group could not be read, so nothing is known of it."""
        ...

    def next_deadline(self, group: Value) -> int | None: ...

    def postponed(self, group: Value, by_ms: int) -> Value:
        """The group with every deadline later: time stood still for it, while it was stored or the node did not run."""
        ...

    def watches(self, group: Value) -> bool:
        """Whether the group is to hear ClusterChanged."""
        ...

    def is_idle(self, group: Value) -> bool:
        """All of it is in Postgres: it may be forgotten."""
        ...

    def is_deleted(self, group: Value) -> bool: ...

    def summary(self, group: Value) -> Summary: ...

    def stored(self, group: Value) -> StoredGroup: ...

    def stored_member(self, group: Value, member_id: MemberId) -> StoredMember | None:
        """None: there is no such member (any more)."""
        ...

    def member_ids(self, group: Value) -> Sequence[MemberId]: ...

    def connection_numbers(self, group: Value) -> Mapping[MemberId, int]:
        """The newest connection by which each member has spoken to this node, where one has. Not stored: it means
        nothing to another node, nor after a restart."""
        ...

    def with_connection_numbers(self, group: Value, numbers: Mapping[MemberId, int]) -> Value:
        """A group that was just read, with what this node knew of it before; members may be others by now."""
        ...

    def restore(
        self,
        group_id: str,
        stored: StoredGroup,
        members: Mapping[MemberId, Document],
        silent_ms: int | None,
        now_ms: int,
        settings: Any,
    ) -> Value:
        """The group for a coordinator that has just begun. `silent_ms`: how long ago one began that has not heard all
        members since; None: the last one had."""
        ...


class Machines:
    """The machines that may play one kind of id. The first is the one of an id that nobody has used."""

    def __init__(self, machines: Mapping[type, Machine]) -> None:
        """By the type of their values."""
        self._by_value = dict(machines)
        self._by_event: dict[type, Machine] = {}
        for machine in machines.values():
            for event in machine.events:
                self._by_event.setdefault(event, machine)
        self._by_group_type = {machine.group_type: machine for machine in machines.values()}
        self._first = next(iter(machines.values()))

    def of(self, group: Value) -> Machine:
        return self._by_value[type(group)]

    def of_type(self, group_type: str) -> Machine:
        return self._by_group_type[group_type]

    def missing(self, group_id: str) -> Value:
        return self._first.missing(group_id)

    def refuse(self, event: Request[Any], error: ErrorCode, *, loading: bool = False) -> Any:
        return self._by_event[type(event)].refuse(event, error, loading=loading)

    def step(self, group: Value, event: Event, cluster: Cluster, now_ms: int, settings: Any) -> Step:
        """Played by the group's machine; a request of another one is played by that, if it can take the group over.

        If it cannot, or refuses the request, the group stays what it was.
        """
        machine = self._by_value[type(group)]
        if type(event) in machine.events or not isinstance(event, Request) or machine.takes(group, event):
            return machine.step(group, event, cluster, now_ms, settings)
        other = self._by_event[type(event)]
        adopted = other.adopt(group, event, cluster, now_ms, settings)
        if not isinstance(adopted, Adopted):
            refused = other.refuse(event, ErrorCode.INCONSISTENT_GROUP_PROTOCOL) if adopted is None else adopted.reply
            return Step(group, ((event.request_id, refused),))
        taken = other.step(adopted.group, event, cluster, now_ms, settings)
        if taken.group is adopted.group:
            return Step(group, taken.replies)
        changed = GroupTypeChanged(machine.group_type, other.group_type, adopted.conversion)
        return Step(taken.group, (*adopted.replies, *taken.replies), (changed, *adopted.facts, *taken.facts))

    def is_long(self, group: Value, event: Event, cluster: Cluster) -> bool:
        """Whether the step is better not taken where others wait for it."""
        machine = self._by_value[type(group)]
        if machine.is_long(group, event, cluster):
            return True
        if not isinstance(event, Request) or type(event) in machine.events:
            return False
        return self._by_event[type(event)].is_long(group, event, cluster)

    def must_store(self, taken: Step) -> bool:
        """Whether something in the step must be in Postgres before its replies leave."""
        if not taken.facts:
            return False
        durable = self.of(taken.group).durable
        return any(type(fact) in durable or type(fact) is GroupTypeChanged for fact in taken.facts)
