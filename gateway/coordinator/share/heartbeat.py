"""ShareGroupHeartbeat: join, live, leave; and how the group follows topics and time.

The one idea: a heartbeat asks three questions in turn. Has what the members want changed? Then the group epoch rises.
Is the target older than the group epoch? Then it is computed again. Does the member's assignment still equal its
target? If not, the response contains the new one at once, because no member has to release partitions first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from uuid import UUID

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.partitions import NOTHING
from gateway.coordinator.consumer.topics import metadata_hash
from gateway.coordinator.facts import (
    AssignmentGiven,
    Departure,
    EveryoneHeard,
    Fact,
    MemberChanged,
    MemberId,
    MemberJoined,
    MemberLeft,
    MemberRejoined,
    RebalanceBegun,
    TargetComputed,
    Trigger,
)
from gateway.coordinator.machine import Step
from gateway.coordinator.member_epochs import JOIN_EPOCH, LEAVE_EPOCH
from gateway.coordinator.settings import ShareSettings
from gateway.coordinator.share.assignor import Reader, assign
from gateway.coordinator.share.model import (
    SIMPLE,
    ShareGroup,
    ShareGroupHeartbeat,
    ShareGroupHeartbeatReply,
    ShareMember,
)
from gateway.coordinator.silence import silence
from protocol.errors import ErrorCode, KafkaError

MAX_MEMBER_ID_LENGTH = 36
"""In UTF-16 code units, as upstream counts."""
INVALID_MEMBER_ID = "Invalid member id in the request."


def heartbeat(
    group: ShareGroup, event: ShareGroupHeartbeat, now_ms: int, settings: ShareSettings, cluster: Cluster
) -> Step[ShareGroup]:
    try:
        check_request(event)
        member = _find(group, event, settings)
    except KafkaError as refused:
        return Step(group, ((event.request_id, ShareGroupHeartbeatReply(refused.code, refused.message)),))
    if event.member_epoch == LEAVE_EPOCH:
        reply = ShareGroupHeartbeatReply(ErrorCode.NONE, None, event.member_id, LEAVE_EPOCH)
        gone = without(group, {event.member_id: Departure.LEFT})
        return Step(gone.group, ((event.request_id, reply),), gone.facts)
    facts: list[Fact] = []
    if member is None:
        facts.append(MemberJoined(event.member_id))
    elif event.member_epoch == JOIN_EPOCH:
        facts.append(MemberRejoined(event.member_id))
    else:
        deadline_ms = group.session_deadlines.get(event.member_id)
        facts.extend(silence(event.member_id, settings.session_timeout_ms, deadline_ms, now_ms))
    updated = _updated(member or ShareMember(event.member_id), event)
    after = replace(
        group,
        exists=True,
        session_deadlines=group.session_deadlines.moved(event.member_id, now_ms + settings.session_timeout_ms),
    )
    if updated is not member:
        after = replace(after, members={**after.members, event.member_id: updated})
        if member is not None and event.member_epoch != JOIN_EPOCH:
            facts.append(MemberChanged(event.member_id))
    after = _compare(after, event.member_id, member, updated, cluster, facts)
    if after.group_epoch > after.assignment_epoch:
        after = compute_target(after, cluster, facts)
    share = after.target.get(event.member_id, NOTHING)
    # A member at the previous epoch may have missed the response with its assignment.
    told = (
        event.member_epoch == JOIN_EPOCH
        or (event.member_epoch != updated.member_epoch and event.member_epoch == updated.previous_member_epoch)
        or event.subscribed_topic_names is not None
        or share != updated.assigned
    )
    if updated.member_epoch != after.assignment_epoch or share != updated.assigned:
        moved = replace(
            updated,
            member_epoch=after.assignment_epoch,
            previous_member_epoch=updated.member_epoch,
            assigned=share,
        )
        after = replace(after, members={**after.members, event.member_id: moved})
        facts.append(AssignmentGiven(event.member_id, moved.member_epoch))
        updated = moved
    if event.member_id in after.unheard:
        after = replace(after, unheard=after.unheard - {event.member_id})
        if not after.unheard:
            facts.append(EveryoneHeard())
    reply = ShareGroupHeartbeatReply(
        ErrorCode.NONE,
        None,
        event.member_id,
        updated.member_epoch,
        settings.heartbeat_interval_ms,
        share if told else None,
    )
    return Step(after, ((event.request_id, reply),), tuple(facts))


def check_request(event: ShareGroupHeartbeat) -> None:
    """Refuse requests that no group could accept, with Kafka's texts if it has any. Raise KafkaError."""
    if not is_member_id(event.member_id):
        raise KafkaError(ErrorCode.INVALID_REQUEST, INVALID_MEMBER_ID)
    if event.rack_id == "":
        raise KafkaError(ErrorCode.INVALID_REQUEST, "RackId can't be empty.")
    if event.member_epoch < LEAVE_EPOCH:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "MemberEpoch is invalid.")
    if event.member_epoch == JOIN_EPOCH and not event.subscribed_topic_names:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "SubscribedTopicNames must be set in first request.")


def is_member_id(text: str) -> bool:
    """Check what upstream checks of a share member's id (KafkaApis.isMemberIdValid): its length, not its form."""
    return 0 < len(text) <= MAX_MEMBER_ID_LENGTH and len(text.encode("utf-16-le")) <= 2 * MAX_MEMBER_ID_LENGTH


def without(group: ShareGroup, departures: Mapping[MemberId, Departure]) -> Step[ShareGroup]:
    """Return the group without these members. The epoch rises once, and the next request of any member computes the
    target."""
    deadlines = group.session_deadlines
    for member_id in departures:
        deadlines = deadlines.without(member_id)
    members = {key: each for key, each in group.members.items() if key not in departures}
    unheard = group.unheard.difference(departures)
    facts: list[Fact] = [MemberLeft(member_id, departure) for member_id, departure in departures.items()]
    facts.append(RebalanceBegun(Trigger.MEMBER_LEFT, next(iter(departures))))
    if group.unheard and not unheard:
        facts.append(EveryoneHeard())
    left = replace(
        group,
        group_epoch=group.group_epoch + 1,
        metadata_hash=group.metadata_hash if members else 0,
        members=members,
        target={key: share for key, share in group.target.items() if key in members},
        unheard=unheard,
        session_deadlines=deadlines,
    )
    return Step(left, (), tuple(facts))


def expire(group: ShareGroup, now_ms: int) -> Step[ShareGroup]:
    """Handle a Tick: remove members that sent no request within their session."""
    due = frozenset(group.session_deadlines.due(now_ms))
    if not due:
        return Step(group)
    # In the order in which the members joined: a step depends only on its values.
    return without(group, {key: Departure.SESSION_EXPIRED for key in group.members if key in due})


def _find(group: ShareGroup, event: ShareGroupHeartbeat, settings: ShareSettings) -> ShareMember | None:
    """Return the member that sends the request, None for a joining member. Raise KafkaError."""
    member = group.members.get(event.member_id)
    if event.member_epoch == JOIN_EPOCH:
        if member is None and len(group.members) >= settings.max_size:
            raise KafkaError(ErrorCode.GROUP_MAX_SIZE_REACHED, f"the group has {settings.max_size} members already")
        return member
    if not group.exists:
        raise KafkaError(ErrorCode.GROUP_ID_NOT_FOUND, f"Group {group.group_id} not found.")
    if member is None:
        raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID, f"no member {event.member_id}")
    # A response may have been lost, and members own nothing: a request at the previous epoch is accepted. So is a
    # request at the epoch that was passed over (`compute_target`), because Kafka would have sent the member that epoch
    # on the way.
    if event.member_epoch > JOIN_EPOCH and event.member_epoch not in (
        member.member_epoch,
        member.member_epoch - 1,
        member.previous_member_epoch,
    ):
        raise KafkaError(
            ErrorCode.FENCED_MEMBER_EPOCH, f"member epoch is {member.member_epoch}, not {event.member_epoch}: join anew"
        )
    return member


def _updated(member: ShareMember, event: ShareGroupHeartbeat) -> ShareMember:
    """Return the member with the values of the request; the same object if nothing is new."""
    names = event.subscribed_topic_names
    updated = replace(
        member,
        rack_id=member.rack_id if event.rack_id is None else event.rack_id,
        client_id=event.client_id,
        client_host=event.client_host,
        subscribed_topic_names=member.subscribed_topic_names if names is None else tuple(sorted(set(names))),
    )
    return member if updated == member and member.member_epoch else updated


def _compare(
    group: ShareGroup,
    member_id: MemberId,
    before: ShareMember | None,
    after: ShareMember,
    cluster: Cluster,
    facts: list[Fact],
) -> ShareGroup:
    """Raise the epoch if subscriptions have changed since the target was computed."""
    changed = before is None or before.subscribed_topic_names != after.subscribed_topic_names
    target_is_old = group.group_epoch > group.assignment_epoch
    if not changed and not target_is_old and group.seen is not None and group.seen.topics is cluster.topics:
        return group
    found = _topics_hash(group, cluster)
    topics_changed = found != group.metadata_hash
    if before is None:
        trigger = Trigger.MEMBER_JOINED
    elif changed:
        trigger = Trigger.SUBSCRIPTION_CHANGED
    elif topics_changed and not target_is_old:
        trigger = Trigger.TOPICS_CHANGED
    else:
        return replace(group, seen=cluster, metadata_hash=found)
    facts.append(RebalanceBegun(trigger, member_id if changed else None))
    return replace(group, seen=cluster, metadata_hash=found, group_epoch=group.group_epoch + 1)


def _topics_hash(group: ShareGroup, cluster: Cluster) -> int:
    return metadata_hash({name for each in group.members.values() for name in each.subscribed_topic_names}, cluster)


def compute_target(group: ShareGroup, cluster: Cluster, facts: list[Fact]) -> ShareGroup:
    """Compute the target anew. Only members whose share differs are written.

    Partitions that the group has never read cost one more epoch. Kafka assigns them to no member before it has written
    the group's start offsets in them, and then has another target. Here they can be read at once, and that epoch is
    passed over, so that epochs are the same at the same moments.
    """
    by_names: dict[tuple[str, ...], frozenset[UUID]] = {}
    readers: dict[MemberId, Reader] = {}
    for member_id, member in group.members.items():
        names = member.subscribed_topic_names
        if names not in by_names:
            by_names[names] = frozenset(cluster.topics[name].topic_id for name in names if name in cluster.topics)
        readers[member_id] = Reader(by_names[names], group.target.get(member_id, NOTHING))
    subscribed = frozenset[UUID]().union(*by_names.values())
    counts = {topic_id: cluster.by_id[topic_id].partition_count for topic_id in subscribed}
    target = assign(readers, counts)
    changed = tuple(key for key, share in target.items() if share != group.target.get(key))
    is_new = any(count > group.begun.get(topic_id, 0) for topic_id, count in counts.items())
    epoch = group.group_epoch + is_new
    facts.append(TargetComputed(epoch, SIMPLE, changed))
    return replace(
        group,
        group_epoch=epoch,
        assignment_epoch=epoch,
        begun={topic_id: count for topic_id, count in group.begun.items() if topic_id in cluster.by_id} | counts,
        topics_revision=max(group.topics_revision, cluster.revision),
        target=target,
    )
