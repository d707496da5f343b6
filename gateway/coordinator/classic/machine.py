"""The classic group coordinator as a whole: one function from a group and an event to the next group and its replies.

The one idea: `step` is a look-up in `table.TABLE`, total over state × event. It takes and returns values: the caller
stores what changed and sends the replies, so restart, failover and simulation need no other code. The protocol itself
is in the modules that the table names. `CLASSIC` offers the same function to the runner.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.coordinator.classic.deadlines import next_deadline, postponed
from gateway.coordinator.classic.handoff_progress import see_topics
from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.classic.observer import guarded, observe, withhold
from gateway.coordinator.classic.restore import restore, stored, stored_member
from gateway.coordinator.classic.table import TABLE
from gateway.coordinator.classic.views import describe
from gateway.coordinator.cluster import NO_TOPICS, Cluster
from gateway.coordinator.consumer.model import ConsumerGroup
from gateway.coordinator.facts import (
    AssignmentGiven,
    Conversion,
    EveryoneHeard,
    Fact,
    GenerationStarted,
    GroupDeleted,
    MemberId,
)
from gateway.coordinator.handoff import HandoffsChanged
from gateway.coordinator.machine import (
    LONG_BYTES,
    Adopted,
    ClusterChanged,
    ConnectedMachine,
    Event,
    Machine,
    Reply,
    Request,
    Step,
    Summary,
    Tick,
    Value,
)
from gateway.coordinator.protocols import offered_bytes
from gateway.coordinator.requests import (
    DeleteGroup,
    DeleteReply,
    Heartbeat,
    HeartbeatReply,
    JoinGroup,
    JoinReply,
    LeaveGroup,
    LeaveReply,
    OffsetCommit,
    OffsetCommitReply,
    SyncGroup,
    SyncReply,
    TxnOffsetCommit,
)
from gateway.coordinator.settings import Settings
from gateway.coordinator.streams.model import StreamsGroup
from protocol.errors import ErrorCode

__all__ = ["CLASSIC", "DURABLE", "describe", "next_deadline", "postponed", "restore", "step", "stored", "stored_member"]

DURABLE: frozenset[type[Fact]] = frozenset(
    {GenerationStarted, AssignmentGiven, EveryoneHeard, GroupDeleted, HandoffsChanged}
)
"""Facts that must be stored before the replies are sent: a generation, its assignments and pending handoffs before
they are delivered, and the end of the group. A join phase in progress may be lost."""


def step(group: Group, event: Event, now_ms: int, settings: Settings, cluster: Cluster = NO_TOPICS) -> Step[Group]:
    """Apply `event` to `group` at `now_ms` (ms on any clock that only rises, the same for all steps of a group).

    An event that is refused, or changes nothing, returns the same `group` object.
    """
    if type(event) is SyncGroup and settings.guards(group.group_id):
        event, withheld = guarded(group, event)
        taken = TABLE[SyncGroup][group.state].handler(group, event, now_ms, settings)
        return withhold(observe(group, event, taken, cluster, now_ms), withheld, now_ms)
    taken = TABLE[type(event)][group.state].handler(group, event, now_ms, settings)
    if type(event) in UNOBSERVED:
        return taken
    return observe(group, event, taken, cluster, now_ms)


UNOBSERVED = frozenset[type]({Heartbeat, OffsetCommit, TxnOffsetCommit})
"""All frequent events. They neither begin a generation nor deliver an assignment."""


def refuse(event: Request[Reply], error: ErrorCode, *, loading: bool = False) -> Reply:
    """Return the reply that refuses `event`. Heartbeats for a group that could not be read get NONE, because
    upstream keeps members alive in that case."""
    match event:
        case JoinGroup():
            return JoinReply(error, event.member_id)
        case SyncGroup():
            return SyncReply(error)
        case Heartbeat():
            return HeartbeatReply(ErrorCode.NONE if loading else error)
        case LeaveGroup():
            return LeaveReply(error)
        case OffsetCommit() | TxnOffsetCommit():
            return OffsetCommitReply(error)
        case DeleteGroup():
            return DeleteReply(error)
        case _:
            raise TypeError(f"{type(event).__name__} is no request of a classic group")


def _reads_subscriptions(group: Group, event: Event) -> bool:
    """Return True if the step may end a join phase, or assigns. Then it reads the subscriptions of all members."""
    if type(event) is SyncGroup:
        return group.state is GroupState.COMPLETING_REBALANCE and event.member_id == group.leader_id
    if group.state is not GroupState.PREPARING_REBALANCE:
        return False
    if type(event) is JoinGroup:
        return group.initial_delay_remaining_ms is None and len(group.members) - group.awaiting_join <= 1
    return type(event) in (LeaveGroup, Tick)


class _Classic(ConnectedMachine[Group]):
    """The `Machine` for `Group`."""

    group_class = Group
    group_type = "classic"
    events = frozenset[type]({JoinGroup, SyncGroup, Heartbeat, LeaveGroup, OffsetCommit, TxnOffsetCommit, DeleteGroup})
    beats = UNOBSERVED
    durable = DURABLE

    def missing(self, group_id: str) -> Group:
        return Group(group_id)

    def takes(self, group: Group, event: Request[Reply]) -> bool:
        return False

    def adopt(
        self, group: Value, event: Request[Reply], cluster: Cluster, now_ms: int, settings: Settings
    ) -> Adopted[Group] | None:
        """Convert a consumer or streams group without members to a classic one. It keeps its offsets; generations
        rise from its epoch."""
        if isinstance(group, ConsumerGroup | StreamsGroup) and not group.members:
            classic = Group(group.group_id, exists=group.exists, generation_id=group.group_epoch)
            return Adopted(classic, Conversion.EMPTY)
        return None

    def step(self, group: Group, event: Event, cluster: Cluster, now_ms: int, settings: Settings) -> Step[Group]:
        if type(event) is ClusterChanged:
            return see_topics(group, cluster, now_ms, settings)
        return step(group, event, now_ms, settings, cluster)

    def is_long(self, group: Value, event: Event, cluster: Cluster) -> bool:
        """Return True if the step may be long, because it reads subscriptions or assignments that may be long."""
        if type(event) is SyncGroup and sum(len(assignment) for _, assignment in event.assignments) > LONG_BYTES:
            return True
        if type(event) is JoinGroup and offered_bytes(event.protocols) > LONG_BYTES:
            return True
        return type(group) is Group and group.offered_bytes > LONG_BYTES and _reads_subscriptions(group, event)

    def refuse(self, event: Request[Reply], error: ErrorCode, *, loading: bool = False) -> Reply:
        return refuse(event, error, loading=loading)

    def watches(self, group: Group) -> bool:
        """Return True while handoffs are pending, because a deleted partition ends its wait. Classic members watch
        their topics themselves."""
        return bool(group.handoffs)

    def is_idle(self, group: Group) -> bool:
        return not group.members and not group.pending

    def is_deleted(self, group: Group) -> bool:
        return group.state is GroupState.DEAD

    def summary(self, group: Group) -> Summary:
        return Summary(
            group_id=group.group_id,
            group_type=self.group_type,
            exists=group.exists,
            state=group.state.value,
            protocol_type=group.protocol_type or "",
            generation_id=group.generation_id,
            member_count=len(group.members),
            subscribed_topics=group.subscribed_topics,
            is_stable=group.state is GroupState.STABLE,
        )

    def member_ids(self, group: Group) -> Sequence[MemberId]:
        return tuple(group.members)

    restore = staticmethod(restore)
    stored = staticmethod(stored)
    stored_member = staticmethod(stored_member)
    next_deadline = staticmethod(next_deadline)
    postponed = staticmethod(postponed)


CLASSIC: Machine[Group, Settings] = _Classic()
