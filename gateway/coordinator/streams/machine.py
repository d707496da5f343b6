"""The streams group coordinator (KIP-1071) as a whole, and the `Machine` that the runner plays.

The one idea: values in, values out, as in `gateway.coordinator.consumer.machine`. The coordinator assigns tasks, so a
step reads the cluster's topics. As upstream, it compares them with
the topology only when a member sends a request, because no member could learn the result earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.classic.restore import session_left_ms
from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.sessions import Deadlines
from gateway.coordinator.document import dump, load
from gateway.coordinator.facts import Conversion, Fact, MemberAway, MemberId, MemberReplaced
from gateway.coordinator.machine import (
    MANY,
    Adopted,
    ClusterChanged,
    ConnectedMachine,
    ConnectionClosed,
    Document,
    Event,
    Machine,
    News,
    Reply,
    Request,
    Step,
    StoredGroup,
    StoredMember,
    Tick,
    Value,
)
from gateway.coordinator.member_epochs import (
    CLASSIC_REQUESTS_OF_MEMBERS,
    DURABLE,
    JOIN_EPOCH,
    EpochMachine,
    delete,
    has_its_share,
    no_classic_member,
    refuse,
)
from gateway.coordinator.protocols import STREAMS_PROTOCOL_TYPE
from gateway.coordinator.requests import (
    DeleteGroup,
    DeleteReply,
    Heartbeat,
    LeaveGroup,
    OffsetCommit,
    OffsetCommitReply,
    SyncGroup,
    TxnOffsetCommit,
)
from gateway.coordinator.settings import Settings, StreamsSettings
from gateway.coordinator.streams.heartbeat import heartbeat, next_deadline, postponed, tick
from gateway.coordinator.streams.model import (
    MemberState,
    StreamsGroup,
    StreamsGroupHeartbeat,
    StreamsGroupHeartbeatReply,
    StreamsMemberRow,
    has_news,
    state_of,
)
from gateway.coordinator.streams.offsets import commit_reply, txn_commit_reply
from gateway.coordinator.streams.tasks import NO_TASKS
from protocol.errors import ErrorCode


def step(
    group: StreamsGroup, event: Event, cluster: Cluster, now_ms: int, settings: StreamsSettings
) -> Step[StreamsGroup]:
    """Apply `event` to `group` at `now_ms` (ms on any clock that only rises, the same for all steps of a group)."""
    match event:
        case StreamsGroupHeartbeat() if cluster.revision < group.topics_revision and event.member_epoch >= JOIN_EPOCH:
            # Another node has decided from topics that this node does not know yet, but will read soon.
            reply = StreamsGroupHeartbeatReply(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "topics are being read")
            return Step(group, ((event.request_id, reply),))
        case StreamsGroupHeartbeat():
            return heartbeat(group, event, now_ms, settings, cluster)
        case Tick():
            return tick(group, cluster, now_ms, settings)
        case OffsetCommit():
            return Step(group, ((event.request_id, commit_reply(group, event, cluster)),))
        case TxnOffsetCommit():
            return Step(group, ((event.request_id, txn_commit_reply(group, event, cluster)),))
        case DeleteGroup():
            return delete(group, event)
        case Heartbeat() | SyncGroup() | LeaveGroup():
            return no_classic_member(group, event)
        case ConnectionClosed() | ClusterChanged() | News():
            # Only heartbeats prove that a member is alive, and each heartbeat compares the topics.
            return Step(group)
        case _:
            raise TypeError(f"{type(event).__name__} is no event of a streams group")


QUICK = frozenset[type]({OffsetCommit, TxnOffsetCommit, DeleteGroup, ConnectionClosed, ClusterChanged})
"""Events that never change the tasks that a member gets."""
MANY_SUBTOPOLOGIES = 100
"""Number of subtopologies above which the first comparison of a topology counts as long."""


def _is_quick(group: StreamsGroup, event: StreamsGroupHeartbeat, cluster: Cluster) -> bool:
    return (
        has_its_share(group, event.member_id, event.member_epoch)
        and not has_news(group, cluster)
        and event.topology is None
        and event.active is None
        and event.standby is None
        and event.user_endpoint is None
        and event.endpoint_information_epoch == group.endpoint_epoch
        and not event.shutdown_application
    )


def _says_much(event: StreamsGroupHeartbeat, cluster: Cluster) -> bool:
    if event.topology is not None:
        subtopologies = event.topology.subtopologies
        if len(subtopologies) > MANY_SUBTOPOLOGIES:
            return True
        if sum(cluster.partition_count(each.source_topics) for each in subtopologies) > MANY:
            return True
    return len(event.active or ()) + len(event.standby or ()) > MANY


class _Streams(ConnectedMachine[StreamsGroup], EpochMachine[StreamsGroup]):
    """`Machine` for `StreamsGroup`."""

    group_class = StreamsGroup
    group_type = "streams"
    protocol_type = STREAMS_PROTOCOL_TYPE
    events = frozenset[type]({StreamsGroupHeartbeat, OffsetCommit, TxnOffsetCommit, DeleteGroup})
    beats = frozenset[type]({StreamsGroupHeartbeat, OffsetCommit, TxnOffsetCommit})
    durable: frozenset[type[Fact]] = DURABLE | {MemberAway, MemberReplaced}

    def watches(self, group: StreamsGroup) -> bool:
        return False

    def missing(self, group_id: str) -> StreamsGroup:
        return StreamsGroup(group_id)

    def is_long(self, group: Value, event: Event, cluster: Cluster) -> bool:
        if isinstance(event, StreamsGroupHeartbeat):
            if _says_much(event, cluster):
                return True
            if type(group) is StreamsGroup and _is_quick(group, event, cluster):
                return False
        elif type(event) in QUICK:
            return False
        configured = group.configured if type(group) is StreamsGroup else None
        return configured is not None and sum(configured.task_counts.values()) > MANY

    def takes(self, group: StreamsGroup, event: Request[Reply]) -> bool:
        """Return whether the group accepts the event. Members of the classic protocol are unknown here, and the
        response says so. A classic join is refused, unless the group has no members and becomes a classic one."""
        return type(event) in CLASSIC_REQUESTS_OF_MEMBERS and bool(group.members)

    def adopt(
        self, group: Value, event: Request[Reply], cluster: Cluster, now_ms: int, settings: Settings
    ) -> Adopted[StreamsGroup] | None:
        """Turn a classic group without members into a streams group with the same offsets; epochs rise from its
        generation."""
        if isinstance(group, Group) and group.state is GroupState.EMPTY:
            streams = StreamsGroup(group.group_id, exists=group.exists, group_epoch=group.generation_id)
            return Adopted(streams, Conversion.EMPTY)
        return None

    def step(
        self, group: StreamsGroup, event: Event, cluster: Cluster, now_ms: int, settings: Settings
    ) -> Step[StreamsGroup]:
        return step(group, event, cluster, now_ms, settings.streams_for(group.group_id))

    def refuse(
        self, event: Request[Reply], error: ErrorCode, *, loading: bool = False
    ) -> StreamsGroupHeartbeatReply | OffsetCommitReply | DeleteReply:
        """Return a refusal. If the group has another type, a join gets the answer for a group that is not found. A
        request of a member of the group gets an error that makes it rejoin."""
        if not isinstance(event, StreamsGroupHeartbeat):
            return refuse(event, error)
        if error is not ErrorCode.INCONSISTENT_GROUP_PROTOCOL:
            return StreamsGroupHeartbeatReply(error)
        if event.member_epoch != JOIN_EPOCH:
            return StreamsGroupHeartbeatReply(ErrorCode.UNKNOWN_MEMBER_ID, f"no member {event.member_id}")
        return StreamsGroupHeartbeatReply(ErrorCode.GROUP_ID_NOT_FOUND, "the group is not a streams group")

    next_deadline = staticmethod(next_deadline)
    postponed = staticmethod(postponed)

    def state_of(self, group: StreamsGroup) -> str:
        return state_of(group).value

    def subscribed_topics(self, group: StreamsGroup) -> frozenset[str]:
        return group.topology.required_topics if group.topology is not None and group.members else frozenset()

    def stored_member(self, group: StreamsGroup, member_id: MemberId) -> StoredMember | None:
        member = group.members.get(member_id)
        if member is None:
            return None
        row = StreamsMemberRow(member, group.target.get(member_id, NO_TASKS))
        return StoredMember(dump(row), member.member_epoch)

    def restore(
        self,
        group_id: str,
        stored: StoredGroup,
        members: Mapping[MemberId, Document],
        silent_ms: int | None,
        now_ms: int,
        settings: Settings,
    ) -> StreamsGroup:
        """Restore the group. Every member gets a full session to send a request, and a full rebalance timeout if it
        must release tasks. But that happens only once: until all members have sent a request, further restarts
        continue the running session. An initial delay begins anew."""
        own = settings.streams_for(group_id)
        left_ms = session_left_ms(own.session_timeout_ms, silent_ms)
        rows = {key: load(StreamsMemberRow, document) for key, document in members.items()}
        group = load(
            StreamsGroup,
            {**stored.document, "group_epoch": stored.generation_id},
            group_id=group_id,
            exists=True,
            members={key: row.member for key, row in rows.items()},
            target={key: row.target for key, row in rows.items()},
            unheard=frozenset(rows),
            session_deadlines=Deadlines(dict.fromkeys(rows, now_ms + left_ms)),
            rebalance_deadlines={
                key: now_ms + row.member.rebalance_timeout_ms
                for key, row in rows.items()
                if row.member.state is MemberState.UNREVOKED
            },
        )
        delay_ms = now_ms + own.initial_rebalance_delay_ms if group.awaits_members else None
        return replace(group, delay_deadline_ms=delay_ms)


STREAMS: Machine[StreamsGroup, Settings] = _Streams()
