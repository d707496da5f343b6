"""The consumer group coordinator (KIP-848) as a whole, and the `Machine` that the runner plays.

The one idea: values in, values out, as in the classic machine. But here the coordinator assigns partitions, so a step
reads the cluster's topics, and the group gets an event when they change.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer import classic_members, handoff
from gateway.coordinator.consumer import restore as records
from gateway.coordinator.consumer.deadlines import next_deadline, postponed, tick
from gateway.coordinator.consumer.draft import Draft
from gateway.coordinator.consumer.heartbeat import heartbeat
from gateway.coordinator.consumer.migration import (
    downgraded,
    downgraded_by,
    is_left_to_classic_members,
    replaces_the_last,
    upgraded,
)
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerGroupHeartbeat, ConsumerGroupHeartbeatReply
from gateway.coordinator.consumer.offsets import commit_reply, txn_commit_reply
from gateway.coordinator.consumer.partitions import size
from gateway.coordinator.consumer.views import has_news, state_of, subscribed_topics
from gateway.coordinator.facts import Conversion, Fact, MemberAway, MemberId, MemberReplaced, Trigger
from gateway.coordinator.handoff import HandoffsChanged
from gateway.coordinator.machine import (
    LONG_BYTES,
    MANY,
    Adopted,
    ClusterChanged,
    ConnectedMachine,
    ConnectionClosed,
    Document,
    Event,
    Machine,
    NotAdopted,
    Reply,
    Request,
    Step,
    StoredGroup,
    Tick,
    Value,
)
from gateway.coordinator.member_epochs import DURABLE, JOIN_EPOCH, EpochMachine, delete, has_its_share, refuse
from gateway.coordinator.protocols import CONSUMER_PROTOCOL_TYPE
from gateway.coordinator.requests import (
    DeleteGroup,
    DeleteReply,
    HandoffProgress,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    OffsetCommit,
    OffsetCommitReply,
    SyncGroup,
    TxnOffsetCommit,
)
from gateway.coordinator.settings import ConsumerSettings, Settings
from protocol.errors import ErrorCode


def step(
    group: ConsumerGroup, event: Event, cluster: Cluster, now_ms: int, settings: ConsumerSettings
) -> Step[ConsumerGroup]:
    """Apply `event` to `group` at `now_ms` (ms on any clock that only rises, the same for all steps of a group)."""
    match event:
        case ConsumerGroupHeartbeat() if cluster.revision < group.topics_revision and event.member_epoch >= JOIN_EPOCH:
            # Another node has decided from topics that this node does not know yet, but will read soon.
            reply = ConsumerGroupHeartbeatReply(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "topics are being read")
            return Step(group, ((event.request_id, reply),))
        case ConsumerGroupHeartbeat():
            return heartbeat(group, event, now_ms, settings, cluster)
        case Tick():
            return tick(group, cluster, now_ms, settings)
        case ClusterChanged():
            return _see_topics(group, cluster, now_ms, settings)
        case OffsetCommit():
            return Step(group, ((event.request_id, commit_reply(group, event)),))
        case TxnOffsetCommit():
            return Step(group, ((event.request_id, txn_commit_reply(group, event)),))
        case DeleteGroup():
            return delete(group, event)
        case HandoffProgress():
            draft = Draft(group, now_ms, settings, cluster)
            return draft.seal() if handoff.progressed(draft, event) else Step(group)
        case ConnectionClosed():
            # Only heartbeats prove that a member is alive, as in Kafka: a new connection is no news.
            return Step(group)
        case _:
            raise TypeError(f"{type(event).__name__} is no event of a consumer group")


def _see_topics(group: ConsumerGroup, cluster: Cluster, now_ms: int, settings: ConsumerSettings) -> Step[ConsumerGroup]:
    """Compare the group with changed topics. Members learn the result with their next heartbeats, as after any
    change."""
    if not group.members or cluster.revision < group.topics_revision or not has_news(group, cluster):
        return Step(group)
    draft = Draft(group, now_ms, settings, cluster)
    if draft.see_topics():
        draft.raise_epoch(Trigger.TOPICS_CHANGED)
        draft.compute_target()
    return draft.seal()


def _step_classic(
    group: ConsumerGroup, event: Event, cluster: Cluster, now_ms: int, settings: Settings
) -> Step[ConsumerGroup | Group]:
    """Apply a request of a classic-protocol member to a consumer group."""
    own = settings.consumer_for(group.group_id)
    match event:
        case JoinGroup() if cluster.revision >= group.topics_revision and replaces_the_last(group, event, settings):
            return downgraded_by(group, event, cluster, now_ms, settings)
        case JoinGroup():
            return classic_members.join(group, event, cluster, now_ms, settings, own)
        case SyncGroup():
            return classic_members.sync(group, event, cluster, now_ms, own)
        case Heartbeat():
            return classic_members.heartbeat(group, event, cluster, now_ms, own)
        case LeaveGroup():
            return classic_members.leave(group, event, cluster, now_ms, own)
        case _:
            raise TypeError(f"{type(event).__name__} is no request of a classic member")


CLASSIC_REQUESTS = frozenset[type]({JoinGroup, SyncGroup, Heartbeat, LeaveGroup})


MAX_NAMES_READ = 100_000
"""Names in all subscriptions above which the topics that a group reads count as unknown. They are computed after each
step, on the event loop."""

QUICK = frozenset[type]({Heartbeat, OffsetCommit, TxnOffsetCommit, DeleteGroup, ConnectionClosed, HandoffProgress})
"""Events that never change the partitions that a member gets."""


def _is_quick(group: ConsumerGroup, event: Event) -> bool:
    if not isinstance(event, ConsumerGroupHeartbeat):
        return type(event) in QUICK
    return (
        has_its_share(group, event.member_id, event.member_epoch)
        and event.subscribed_topic_names is None
        and event.subscribed_topic_regex is None
        and event.owned is None
    )


def _says_much(_group: Value, event: ConsumerGroupHeartbeat, cluster: Cluster) -> bool:
    names = event.subscribed_topic_names
    return (
        (names is not None and (len(names) > MANY or cluster.partition_count(names) > MANY))
        or (event.subscribed_topic_regex is not None and len(cluster.topics) > MANY)
        or (event.owned is not None and size(event.owned) > MANY)
    )


def _resolves(group: ConsumerGroup, event: Event, cluster: Cluster) -> bool:
    """Return whether patterns must be matched with other topics, or shown to another reader."""
    if type(event) in QUICK or not (has_news(group, cluster) or _is_of_another(group, event)):
        return False
    return any(text for _, text, _ in group.subscriptions)


def _is_of_another(group: ConsumerGroup, event: Event) -> bool:
    if not isinstance(event, ConsumerGroupHeartbeat) or event.principal is None:
        return False
    member = group.members.get(event.member_id)
    return member is not None and (member.principal, member.client_host) != (event.principal, event.client_host)


def _names(group: ConsumerGroup) -> int:
    """Return the number of topic names in all different subscriptions."""
    return sum(len(names) for names, _, _ in group.subscriptions)


def _is_wide(group: ConsumerGroup) -> bool:
    return _names(group) > MANY or sum(map(len, group.owners.values())) > MANY


class _Consumer(ConnectedMachine[ConsumerGroup], EpochMachine[ConsumerGroup]):
    """`Machine` for `ConsumerGroup`."""

    group_class = ConsumerGroup
    group_type = "consumer"
    protocol_type = CONSUMER_PROTOCOL_TYPE
    events = frozenset[type]({ConsumerGroupHeartbeat, OffsetCommit, TxnOffsetCommit, DeleteGroup})
    beats = frozenset[type]({OffsetCommit, TxnOffsetCommit, ConsumerGroupHeartbeat})
    durable: frozenset[type[Fact]] = DURABLE | {HandoffsChanged, MemberAway, MemberReplaced}

    def missing(self, group_id: str) -> ConsumerGroup:
        return ConsumerGroup(group_id)

    def takes(self, group: ConsumerGroup, event: Request[Reply]) -> bool:
        """Return whether the group accepts the event. Members may speak the classic protocol. A group without
        members becomes a classic group instead."""
        return type(event) in CLASSIC_REQUESTS and bool(group.members)

    def adopt(
        self, group: Value, event: Request[Reply], cluster: Cluster, now_ms: int, settings: Settings
    ) -> Adopted[ConsumerGroup] | NotAdopted | None:
        """Turn a classic group into a consumer group with the same offsets; epochs rise from its generation. A group
        with members is converted when a consumer member joins it (`migration.py`)."""
        if not isinstance(group, Group):
            return None
        if group.state is GroupState.EMPTY:
            consumer = ConsumerGroup(group.group_id, exists=group.exists, group_epoch=group.generation_id)
            return Adopted(consumer, Conversion.EMPTY)
        if isinstance(event, ConsumerGroupHeartbeat) and event.member_epoch == JOIN_EPOCH:
            return upgraded(group, cluster, now_ms, settings)
        return None

    def is_long(self, group: Value, event: Event, cluster: Cluster) -> bool:
        if isinstance(event, ConsumerGroupHeartbeat) and _says_much(group, event, cluster):
            return True
        if type(group) is not ConsumerGroup:
            if type(group) is not Group:
                return False
            return group.offered_bytes + sum(len(each.assignment) for each in group.members.values()) > LONG_BYTES
        if len(cluster.topics) > MANY and _resolves(group, event, cluster):
            return True
        return not _is_quick(group, event) and _is_wide(group)

    def step(
        self, group: ConsumerGroup, event: Event, cluster: Cluster, now_ms: int, settings: Settings
    ) -> Step[ConsumerGroup | Group]:
        if type(event) in CLASSIC_REQUESTS:
            taken = _step_classic(group, event, cluster, now_ms, settings)
        else:
            taken = step(group, event, cluster, now_ms, settings.consumer_for(group.group_id))
        after = taken.group
        # A node that is behind cannot name all topics of the members, so the group stays a consumer group until then.
        later = type(event) is ClusterChanged
        if (
            (taken.facts or later)
            and isinstance(after, ConsumerGroup)
            and cluster.revision >= after.topics_revision
            and is_left_to_classic_members(group, after, taken.facts, settings, later=later)
        ):
            return downgraded(Step(after, taken.replies, taken.facts), cluster, now_ms, settings)
        return taken

    def refuse(
        self, event: Request[Reply], error: ErrorCode, *, loading: bool = False
    ) -> ConsumerGroupHeartbeatReply | OffsetCommitReply | DeleteReply:
        """Return a refusal. If the group has another type, a join gets upstream's answer for a group that is not
        found, which shows clients that a retry is hopeless. A request at any other epoch is answered
        UNKNOWN_MEMBER_ID, so that the client joins: it may have been a member before the group changed its type."""
        if not isinstance(event, ConsumerGroupHeartbeat):
            return refuse(event, error)
        if error is not ErrorCode.INCONSISTENT_GROUP_PROTOCOL:
            return ConsumerGroupHeartbeatReply(error)
        if event.member_epoch != JOIN_EPOCH:
            return ConsumerGroupHeartbeatReply(ErrorCode.UNKNOWN_MEMBER_ID, f"no member {event.member_id}")
        return ConsumerGroupHeartbeatReply(ErrorCode.GROUP_ID_NOT_FOUND, "the group has members of another protocol")

    next_deadline = staticmethod(next_deadline)
    postponed = staticmethod(postponed)
    stored_member = staticmethod(records.stored_member)

    def state_of(self, group: ConsumerGroup) -> str:
        return state_of(group).value

    def subscribed_topics(self, group: ConsumerGroup) -> frozenset[str] | None:
        # Patterns of a group that was read back are matched at the next request of a member, as a postponed one is.
        is_resolved = group.seen is not None and not group.postponed
        is_known = is_resolved and _names(group) <= MAX_NAMES_READ
        return subscribed_topics(group) if is_known or not group.members else None

    def restore(
        self,
        group_id: str,
        stored: StoredGroup,
        members: Mapping[MemberId, Document],
        silent_ms: int | None,
        now_ms: int,
        settings: Settings,
    ) -> ConsumerGroup:
        effective = settings.consumer_for(group_id)
        return records.restore(group_id, stored, members, silent_ms, now_ms, effective)


CONSUMER: Machine[ConsumerGroup, Settings] = _Consumer()
