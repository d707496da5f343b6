"""Members of a consumer group that speak the classic protocol: JoinGroup, SyncGroup, Heartbeat and LeaveGroup.

The one idea: such a member is like any other, only its requests have another form. JoinGroup is a complete heartbeat
that is answered at once, without a leader: its metadata contains the subscription and the partitions that the member
still owns, and the generation is the member's epoch. SyncGroup reads the assignment. Heartbeat asks a member to rejoin
if it must release partitions or may take some over. Follows `classicGroupJoinToConsumerGroup` and its siblings in
upstream's GroupMetadataManager.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.coordinator.classic.identity import NO_MEMBER_ID
from gateway.coordinator.classic.join import KNOWN_MEMBER_ID_REQUIRED, rebalance_timeout_ms
from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer import embedded
from gateway.coordinator.consumer.draft import Draft
from gateway.coordinator.consumer.heartbeat import proceed
from gateway.coordinator.consumer.identity import check_not_overtaken
from gateway.coordinator.consumer.model import ClassicProtocol, ConsumerGroup, ConsumerMember, MemberState
from gateway.coordinator.consumer.partitions import NOTHING, Partitions, difference
from gateway.coordinator.facts import Departure, MemberId, MemberJoined, MemberRejoined, MemberReplaced, shortened
from gateway.coordinator.machine import Step
from gateway.coordinator.protocols import CONSUMER_PROTOCOL_TYPE, names
from gateway.coordinator.requests import (
    Heartbeat,
    HeartbeatReply,
    JoinGroup,
    JoinReply,
    LeaveGroup,
    LeaveReply,
    LeavingMember,
    LeftMember,
    SyncGroup,
    SyncReply,
)
from gateway.coordinator.settings import ConsumerSettings, Settings
from gateway.coordinator.silence import silence
from protocol.consumer import Subscription
from protocol.errors import ErrorCode, KafkaError, ProtocolError

# --- JoinGroup ------------------------------------------------------------------------------------------------------


def join(
    group: ConsumerGroup,
    event: JoinGroup,
    cluster: Cluster,
    now_ms: int,
    settings: Settings,
    consumer_settings: ConsumerSettings,
) -> Step[ConsumerGroup]:
    try:
        if not (
            settings.group_min_session_timeout_ms <= event.session_timeout_ms <= settings.group_max_session_timeout_ms
        ):
            raise KafkaError(ErrorCode.INVALID_SESSION_TIMEOUT)
        if cluster.revision < group.topics_revision:
            raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "topics are being read")
        known = _find_joining(group, event, consumer_settings)
        classic = ClassicProtocol(event.session_timeout_ms, event.protocols)
        _check_compatible(group, event, classic, known)
        nameless = known is None and not event.member_id and event.group_instance_id is None
        if nameless and event.version >= KNOWN_MEMBER_ID_REQUIRED:
            # The coordinator does not remember the id: a member that joins with an unknown id is accepted.
            return Step(group, ((event.request_id, JoinReply(ErrorCode.MEMBER_ID_REQUIRED, event.new_member_id)),))
        subscription = _subscription(classic)
        if known is None and event.member_id and (subscription.owned_partitions or subscription.generation_id >= 0):
            # A removed member may still read partitions in which other members have continued. It must begin anew.
            raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID)
    except KafkaError as refused:
        # Upstream returns the member id in this refusal only.
        member_id = event.member_id if refused.code is ErrorCode.INVALID_SESSION_TIMEOUT else NO_MEMBER_ID
        return Step(group, ((event.request_id, JoinReply(refused.code, member_id)),))
    draft = Draft(group, now_ms, consumer_settings, cluster)
    member = replace(
        _begin(draft, event, known),
        instance_id=event.group_instance_id,
        rack_id=subscription.rack_id,
        client_id=event.client_id,
        client_host=event.client_host,
        rebalance_timeout_ms=rebalance_timeout_ms(event),
        subscribed_topic_names=tuple(sorted(set(subscription.topics))),
        subscribed_topic_regex="",
        server_assignor=None,
        classic=classic,
        connection_number=event.connection_number,
        connection_id=event.connection_id,
    )
    after = proceed(draft, known, member, _owned(member, subscription, cluster), NOTHING)
    draft.join_deadlines.pop(after.member_id, None)
    draft.sync_deadlines[after.member_id] = now_ms + after.rebalance_timeout_ms
    reply = JoinReply(
        ErrorCode.NONE,
        after.member_id,
        after.member_epoch,
        CONSUMER_PROTOCOL_TYPE,
        embedded.protocol_name(classic),
    )
    draft.answer(event.request_id, reply)
    return draft.seal()


def _find_joining(group: ConsumerGroup, event: JoinGroup, settings: ConsumerSettings) -> ConsumerMember | None:
    """Return the member that the join continues or replaces; None for a new member. Raise KafkaError.

    A dynamic member is accepted under any unused id, because the coordinator does not remember which ids it has handed
    out. (A member that names an earlier generation or claims partitions is not accepted: see `join`.)
    """
    if event.group_instance_id is not None:
        owner_id = group.instances.get(event.group_instance_id)
        if owner_id is None and event.member_id:
            raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID)
        if owner_id is not None and event.member_id not in (NO_MEMBER_ID, owner_id):
            raise KafkaError(ErrorCode.FENCED_INSTANCE_ID)
        known = None if owner_id is None else group.members[owner_id]
    else:
        known = group.members.get(event.member_id)
    if known is None:
        if len(group.members) >= settings.max_size:
            raise KafkaError(ErrorCode.GROUP_MAX_SIZE_REACHED)
    elif event.member_id:
        if known.classic is None:
            raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID, "the member speaks the consumer protocol")
        check_not_overtaken(known, event.connection_number)
    return known


def _check_compatible(
    group: ConsumerGroup, event: JoinGroup, classic: ClassicProtocol, known: ConsumerMember | None
) -> None:
    """Raise KafkaError if the join is not compatible with the group."""
    others = (member.classic for member in group.members.values() if member.classic is not None and member is not known)
    if (
        event.protocol_type != CONSUMER_PROTOCOL_TYPE
        or not names(classic.protocols)
        or not embedded.compatible(classic, others)
    ):
        raise KafkaError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)


def _subscription(classic: ClassicProtocol) -> Subscription:
    """Return the subscription of the member. Raise KafkaError if it cannot be read."""
    try:
        return embedded.subscription(classic)
    except ProtocolError as unreadable:
        raise KafkaError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, str(unreadable)) from unreadable


def _begin(draft: Draft, event: JoinGroup, known: ConsumerMember | None) -> ConsumerMember:
    """Return the joining member before the values of the request are applied to it."""
    if known is None:
        member = ConsumerMember(event.member_id or event.new_member_id)
        draft.tell(MemberJoined(member.member_id, event.group_instance_id, shortened(event.reason)))
        return member
    if event.member_id:
        draft.tell(MemberRejoined(known.member_id, shortened(event.reason)))
        return known
    # A static member has restarted, with either protocol before. Its new process owns nothing yet.
    member_id, instance_id = event.new_member_id, event.group_instance_id or ""
    draft.tell(MemberReplaced(member_id, known.member_id, instance_id, shortened(event.reason)))
    fresh = replace(known, member_id=member_id, undrained=NOTHING)
    member = replace(fresh, member_epoch=0, previous_member_epoch=0, state=MemberState.STABLE)
    draft.succeed(known.member_id, member)
    return member


def _owned(member: ConsumerMember, subscription: Subscription, cluster: Cluster) -> Partitions | None:
    """Return the partitions that the member reports as owned. Return None if it names another generation than its own.
    Then it has missed a response, and may own the partitions that this response assigned.
    """
    owned = embedded.by_id(subscription.owned_partitions, cluster)
    if owned and subscription.generation_id not in (-1, member.member_epoch):
        return None
    return owned


# --- SyncGroup ------------------------------------------------------------------------------------------------------


def sync(
    group: ConsumerGroup, event: SyncGroup, cluster: Cluster, now_ms: int, settings: ConsumerSettings
) -> Step[ConsumerGroup]:
    try:
        member, classic = _find_speaking(group, event.member_id, event.group_instance_id, event.generation_id)
        if event.protocol_type not in (None, CONSUMER_PROTOCOL_TYPE):
            raise KafkaError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        if event.protocol_name is not None and event.protocol_name not in names(classic.protocols):
            raise KafkaError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
    except KafkaError as refused:
        return Step(group, ((event.request_id, SyncReply(refused.code)),))
    draft = Draft(group, now_ms, settings, cluster)
    draft.hear(member.member_id)
    # Another node may have assigned topics that this node cannot name yet. A member that joins again waits for them.
    is_behind = cluster.revision < group.topics_revision
    if is_behind or (member.member_epoch < group.group_epoch and member.state is not MemberState.UNREVOKED):
        _await_join(draft, member)
        draft.answer(event.request_id, SyncReply(ErrorCode.REBALANCE_IN_PROGRESS))
        return draft.seal()
    draft.sync_deadlines.pop(member.member_id, None)
    version = embedded.subscription(classic).version
    reply = SyncReply(
        ErrorCode.NONE,
        CONSUMER_PROTOCOL_TYPE,
        embedded.protocol_name(classic),
        embedded.assignment(member.assigned, version, cluster),
    )
    draft.answer(event.request_id, reply)
    return draft.seal()


# --- Heartbeat ------------------------------------------------------------------------------------------------------


def heartbeat(
    group: ConsumerGroup, event: Heartbeat, cluster: Cluster, now_ms: int, settings: ConsumerSettings
) -> Step[ConsumerGroup]:
    """Answer REBALANCE_IN_PROGRESS if rejoining takes the member a step on: the subscriptions have changed, the
    member must release partitions, or all that it waits for is free."""
    try:
        member, classic = _find_speaking(group, event.member_id, event.group_instance_id, event.generation_id)
    except KafkaError as refused:
        return Step(group, ((event.request_id, HeartbeatReply(refused.code)),))
    deadline_ms = group.session_deadlines.get(member.member_id)
    silent = silence(member.member_id, classic.session_timeout_ms, deadline_ms, now_ms)
    if not _must_join(group, member):
        reply = HeartbeatReply(ErrorCode.NONE)
        if member.member_id not in group.unheard:
            heard = group.with_session_deadline(member.member_id, now_ms + classic.session_timeout_ms)
            return Step(heard, ((event.request_id, reply),), silent)
    else:
        reply = HeartbeatReply(ErrorCode.REBALANCE_IN_PROGRESS)
    draft = Draft(group, now_ms, settings, cluster)
    if member.member_id not in group.unheard:
        draft.facts += silent
    draft.hear(member.member_id)
    if reply.error is not ErrorCode.NONE:
        _await_join(draft, member)
    draft.answer(event.request_id, reply)
    return draft.seal()


def _must_join(group: ConsumerGroup, member: ConsumerMember) -> bool:
    if member.member_epoch < group.group_epoch or member.state is MemberState.UNREVOKED:
        return True
    return member.state is MemberState.UNRELEASED and not _waits_for_others(group, member)


def _waits_for_others(group: ConsumerGroup, member: ConsumerMember) -> bool:
    missing = difference(group.target.get(member.member_id, NOTHING), member.assigned)
    return any(
        group.owners.get(topic_id, {}).get(index, member.member_id) != member.member_id
        for topic_id, indexes in missing.items()
        for index in indexes
    )


def _await_join(draft: Draft, member: ConsumerMember) -> None:
    """Start the member's time to rejoin. It runs from the first such response, however many follow."""
    draft.join_deadlines.setdefault(member.member_id, draft.now_ms + member.rebalance_timeout_ms)


def _find_speaking(
    group: ConsumerGroup, member_id: MemberId, instance_id: str | None, generation_id: int
) -> tuple[ConsumerMember, ClassicProtocol]:
    """Return the member that sends the request. Raise KafkaError."""
    if instance_id is not None:
        owner_id = group.instances.get(instance_id)
        if owner_id is None or member_id == NO_MEMBER_ID:
            raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID)
        if owner_id != member_id:
            raise KafkaError(ErrorCode.FENCED_INSTANCE_ID)
    member = group.members.get(member_id)
    if member is None or member.classic is None:
        raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID)
    if generation_id != member.member_epoch:
        raise KafkaError(ErrorCode.ILLEGAL_GENERATION)
    return member, member.classic


# --- LeaveGroup -----------------------------------------------------------------------------------------------------


def leave(
    group: ConsumerGroup, event: LeaveGroup, cluster: Cluster, now_ms: int, settings: ConsumerSettings
) -> Step[ConsumerGroup]:
    """Remove members of either protocol; administrators send the same request to remove members."""
    going: dict[MemberId, tuple[Departure, str | None]] = {}
    left: list[LeftMember] = []
    for leaving in event.members:
        member_id = _find_leaving(group, leaving)
        error = member_id if isinstance(member_id, ErrorCode) else ErrorCode.NONE
        if not isinstance(member_id, ErrorCode):
            if member_id in going:
                error = ErrorCode.UNKNOWN_MEMBER_ID
            going.setdefault(member_id, (Departure.LEFT, leaving.reason))
        left.append(LeftMember(leaving.member_id, leaving.group_instance_id, error))
    reply = LeaveReply(ErrorCode.NONE, tuple(left))
    if not going:
        return Step(group, ((event.request_id, reply),))
    draft = Draft(group, now_ms, settings, cluster)
    draft.lose_all(going)
    draft.answer(event.request_id, reply)
    return draft.seal()


def _find_leaving(group: ConsumerGroup, leaving: LeavingMember) -> MemberId | ErrorCode:
    if leaving.group_instance_id is None:
        return leaving.member_id if leaving.member_id in group.members else ErrorCode.UNKNOWN_MEMBER_ID
    owner_id = group.instances.get(leaving.group_instance_id)
    if owner_id is None:
        return ErrorCode.UNKNOWN_MEMBER_ID
    return owner_id if leaving.member_id in (NO_MEMBER_ID, owner_id) else ErrorCode.FENCED_INSTANCE_ID
