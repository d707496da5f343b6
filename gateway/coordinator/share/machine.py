"""The share group coordinator (KIP-932) as a whole, and the `Machine` that the runner plays.

The one idea: values in, values out, as in `gateway.coordinator.consumer.machine`. A share group commits no offsets: the
nodes that lead its partitions keep its position, and none of that passes through here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gateway.coordinator.classic.model import Group
from gateway.coordinator.classic.restore import session_left_ms
from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.partitions import NOTHING
from gateway.coordinator.consumer.sessions import Deadlines
from gateway.coordinator.document import dump, load
from gateway.coordinator.facts import Conversion, MemberId
from gateway.coordinator.machine import (
    MANY,
    Adopted,
    ClusterChanged,
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
    no_classic_member,
    refuse,
)
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
from gateway.coordinator.settings import Settings, ShareSettings
from gateway.coordinator.share.heartbeat import expire, heartbeat
from gateway.coordinator.share.model import (
    BeginShareGroup,
    ShareGroup,
    ShareGroupBegun,
    ShareGroupHeartbeat,
    ShareGroupHeartbeatReply,
    ShareMemberRow,
    state_of,
)
from protocol.errors import ErrorCode

SHARE_PROTOCOL_TYPE = "share"


def step(group: ShareGroup, event: Event, cluster: Cluster, now_ms: int, settings: ShareSettings) -> Step[ShareGroup]:
    """Apply `event` to `group` at `now_ms` (ms on any clock that only rises, the same for all steps of a group)."""
    match event:
        case ShareGroupHeartbeat() if cluster.revision < group.topics_revision and event.member_epoch >= JOIN_EPOCH:
            # Another node has decided from topics that this node does not know yet, but will read soon.
            reply = ShareGroupHeartbeatReply(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "topics are being read")
            return Step(group, ((event.request_id, reply),))
        case ShareGroupHeartbeat():
            return heartbeat(group, event, now_ms, settings, cluster)
        case BeginShareGroup():
            begun = group if group.exists else replace(group, exists=True)
            return Step(begun, ((event.request_id, ShareGroupBegun(ErrorCode.NONE)),))
        case Tick():
            return expire(group, now_ms)
        case OffsetCommit() | TxnOffsetCommit():
            return Step(group, ((event.request_id, OffsetCommitReply(ErrorCode.GROUP_ID_NOT_FOUND)),))
        case DeleteGroup():
            return delete(group, event)
        case Heartbeat() | SyncGroup() | LeaveGroup():
            return no_classic_member(group, event)
        case ConnectionClosed() | ClusterChanged() | News():
            # Only heartbeats prove that a member is alive, and each heartbeat compares the topics.
            return Step(group)
        case _:
            raise TypeError(f"{type(event).__name__} is no event of a share group")


QUICK = frozenset[type]({BeginShareGroup, OffsetCommit, TxnOffsetCommit, DeleteGroup, ConnectionClosed})
"""Events that never change the partitions that a member gets."""


def _is_wide(group: ShareGroup) -> bool:
    names = sum(len(member.subscribed_topic_names) for member in group.members.values())
    return names > MANY or sum(group.begun.values()) > MANY


class _Share(EpochMachine[ShareGroup]):
    """`Machine` for `ShareGroup`."""

    group_class = ShareGroup
    group_type = "share"
    protocol_type = SHARE_PROTOCOL_TYPE
    events = frozenset[type]({ShareGroupHeartbeat, BeginShareGroup, OffsetCommit, TxnOffsetCommit, DeleteGroup})
    beats = frozenset[type]({ShareGroupHeartbeat, OffsetCommit, TxnOffsetCommit})
    durable = DURABLE

    def missing(self, group_id: str) -> ShareGroup:
        return ShareGroup(group_id)

    def is_long(self, group: Value, event: Event, cluster: Cluster) -> bool:
        if isinstance(event, ShareGroupHeartbeat):
            names = event.subscribed_topic_names
            if names is not None and (len(names) > MANY or cluster.partition_count(names) > MANY):
                return True
            if names is None and event.member_epoch > JOIN_EPOCH and type(group) is ShareGroup:
                member = group.members.get(event.member_id)
                if member is not None and member.member_epoch == group.group_epoch:
                    return False
        elif type(event) in QUICK:
            return False
        return type(group) is ShareGroup and _is_wide(group)

    def takes(self, group: ShareGroup, event: Request[Reply]) -> bool:
        """Return whether the group accepts the event. Members of the classic protocol are unknown here, and the
        response says so; a classic join is refused."""
        return type(event) in CLASSIC_REQUESTS_OF_MEMBERS

    def adopt(
        self, group: Value, event: Request[Reply], cluster: Cluster, now_ms: int, settings: Settings
    ) -> Adopted[ShareGroup] | None:
        """Turn an unused id into a share group. A group of another type never becomes one."""
        if isinstance(group, Group) and not group.exists and not group.pending:
            return Adopted(ShareGroup(group.group_id), Conversion.EMPTY)
        return None

    def step(
        self, group: ShareGroup, event: Event, cluster: Cluster, now_ms: int, settings: Settings
    ) -> Step[ShareGroup]:
        return step(group, event, cluster, now_ms, settings.share_for(group.group_id))

    def refuse(
        self, event: Request[Reply], error: ErrorCode, *, loading: bool = False
    ) -> ShareGroupHeartbeatReply | ShareGroupBegun | OffsetCommitReply | DeleteReply:
        match event:
            case ShareGroupHeartbeat():
                if error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL:
                    return ShareGroupHeartbeatReply(ErrorCode.GROUP_ID_NOT_FOUND, "the group is not a share group")
                return ShareGroupHeartbeatReply(error)
            case BeginShareGroup():
                is_other = error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
                return ShareGroupBegun(ErrorCode.GROUP_ID_NOT_FOUND if is_other else error)
            case _:
                return refuse(event, error)

    def next_deadline(self, group: ShareGroup) -> int | None:
        return group.session_deadlines.earliest()

    def postponed(self, group: ShareGroup, by_ms: int) -> ShareGroup:
        return replace(group, session_deadlines=group.session_deadlines.later(by_ms))

    def state_of(self, group: ShareGroup) -> str:
        return state_of(group).value

    def subscribed_topics(self, group: ShareGroup) -> None:
        """Return None: such a group has no committed offsets, so no caller needs its topics."""

    def stored_member(self, group: ShareGroup, member_id: MemberId) -> StoredMember | None:
        member = group.members.get(member_id)
        if member is None:
            return None
        row = ShareMemberRow(member, group.target.get(member_id, NOTHING))
        return StoredMember(dump(row), member.member_epoch)

    def watches(self, group: ShareGroup) -> bool:
        """Return False. Epochs rise with heartbeats, as in Kafka: topics that came one by one cost one epoch."""
        return False

    def connection_numbers(self, group: ShareGroup) -> Mapping[MemberId, int]:
        """Return no numbers. Members own nothing, so a late request on an older connection does no harm."""
        return {}

    def with_connection_numbers(self, group: ShareGroup, numbers: Mapping[MemberId, int]) -> ShareGroup:
        return group

    def restore(
        self,
        group_id: str,
        stored: StoredGroup,
        members: Mapping[MemberId, Document],
        silent_ms: int | None,
        now_ms: int,
        settings: Settings,
    ) -> ShareGroup:
        """Restore the group. Every member gets a full session to send a request, once: until all members have sent
        one, further restarts continue the running session."""
        own = settings.share_for(group_id)
        left_ms = session_left_ms(own.session_timeout_ms, silent_ms)
        rows = {key: load(ShareMemberRow, document) for key, document in members.items()}
        return load(
            ShareGroup,
            {**stored.document, "group_epoch": stored.generation_id},
            group_id=group_id,
            exists=True,
            members={key: row.member for key, row in rows.items()},
            target={key: row.target for key, row in rows.items()},
            unheard=frozenset(rows),
            session_deadlines=Deadlines(dict.fromkeys(rows, now_ms + left_ms)),
        )


SHARE: Machine[ShareGroup, Settings] = _Share()
