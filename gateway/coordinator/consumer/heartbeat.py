"""ConsumerGroupHeartbeat: join, report, reconcile, leave.

The one idea: every heartbeat asks the same four questions in turn. Has what the members want changed? Then the group
epoch rises. Is the target older than the group epoch? Then it is computed again. How far may this member come now? What
must the response contain? A heartbeat without news answers all four with one check and moves one deadline.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer.current_assignment import reconcile
from gateway.coordinator.consumer.draft import Draft
from gateway.coordinator.consumer.handoff import retained
from gateway.coordinator.consumer.identity import check_join, check_request, find_member
from gateway.coordinator.consumer.model import (
    ConsumerGroup,
    ConsumerGroupHeartbeat,
    ConsumerGroupHeartbeatReply,
    ConsumerMember,
    MemberState,
    subscription_of,
)
from gateway.coordinator.consumer.partitions import NOTHING, Partitions, difference, intersection, meet, union
from gateway.coordinator.consumer.views import has_news
from gateway.coordinator.facts import (
    AssignmentGiven,
    Departure,
    Fact,
    MemberAway,
    MemberJoined,
    MemberRejoined,
    MemberReplaced,
    Trigger,
)
from gateway.coordinator.handoff import HandoffEnd
from gateway.coordinator.machine import Step
from gateway.coordinator.member_epochs import JOIN_EPOCH, LEAVE_EPOCH, STATIC_LEAVE_EPOCH, UNRELEASED_INTERVAL_MS
from gateway.coordinator.settings import ConsumerSettings
from gateway.coordinator.silence import silence
from protocol.errors import ErrorCode, KafkaError


def heartbeat(
    group: ConsumerGroup, event: ConsumerGroupHeartbeat, now_ms: int, settings: ConsumerSettings, cluster: Cluster
) -> Step[ConsumerGroup]:
    try:
        check_request(event, settings)
        if event.member_epoch in (LEAVE_EPOCH, STATIC_LEAVE_EPOCH):
            return _leave(group, event, find_member(group, event), now_ms, settings, cluster)
        if event.member_epoch == JOIN_EPOCH:
            return _join(group, event, check_join(group, event, settings), now_ms, settings, cluster)
        member = find_member(group, event)
    except KafkaError as refused:
        return Step(group, ((event.request_id, ConsumerGroupHeartbeatReply(refused.code, refused.message)),))
    silent = silence(
        member.member_id, settings.session_timeout_ms, group.session_deadlines.get(member.member_id), now_ms
    )
    if _has_no_news(group, event, member, cluster):
        return _keep_alive(group, event, member, now_ms, settings, silent)
    draft = Draft(group, now_ms, settings, cluster)
    if member.member_id not in group.unheard:
        draft.facts += silent
    return _proceed(draft, event, member, _updated(member, event, cluster))


def _has_no_news(group: ConsumerGroup, event: ConsumerGroupHeartbeat, member: ConsumerMember, cluster: Cluster) -> bool:
    return (
        member.state is MemberState.STABLE
        and event.member_epoch == member.member_epoch == group.assignment_epoch == group.group_epoch
        and event.owned is None
        and event.subscribed_topic_names is None
        and event.subscribed_topic_regex is None
        and event.server_assignor is None
        and event.rack_id is None
        and event.rebalance_timeout_ms == -1
        and event.connection_number == member.connection_number
        and not has_news(group, cluster)
        and member.member_id not in group.unheard
    )


def _keep_alive(
    group: ConsumerGroup,
    event: ConsumerGroupHeartbeat,
    member: ConsumerMember,
    now_ms: int,
    settings: ConsumerSettings,
    silent: tuple[Fact, ...],
) -> Step[ConsumerGroup]:
    heard = group.with_session_deadline(member.member_id, now_ms + settings.session_timeout_ms)
    reply = ConsumerGroupHeartbeatReply(
        ErrorCode.NONE, None, member.member_id, member.member_epoch, settings.heartbeat_interval_ms
    )
    return Step(heard, ((event.request_id, reply),), silent)


def _join(
    group: ConsumerGroup,
    event: ConsumerGroupHeartbeat,
    known: ConsumerMember | None,
    now_ms: int,
    settings: ConsumerSettings,
    cluster: Cluster,
) -> Step[ConsumerGroup]:
    """Join a member. A known member that joins again under its id has lost what it owned. A member that takes the
    place of a static member that left for a while gets what that member had."""
    draft = Draft(group, now_ms, settings, cluster)
    member_id = event.member_id or event.new_member_id
    if known is None:
        draft.tell(MemberJoined(member_id, event.instance_id))
        return _proceed(draft, event, None, _updated(ConsumerMember(member_id), event, cluster))
    if known.member_id == member_id and known.member_epoch != STATIC_LEAVE_EPOCH and known.classic is None:
        draft.tell(MemberRejoined(member_id))
        fresh = replace(
            known, assigned=NOTHING, pending_revocation=NOTHING, untaken=NOTHING, undrained=NOTHING, held_since=()
        )
    else:
        draft.tell(MemberReplaced(member_id, known.member_id, event.instance_id or ""))
        fresh = replace(
            known, member_id=member_id, connection_number=-1, classic=None, undrained=NOTHING, held_since=()
        )
        for deadlines in (draft.join_deadlines, draft.sync_deadlines):
            deadlines.pop(member_id, None)
    fresh = replace(fresh, member_epoch=0, previous_member_epoch=0, state=MemberState.STABLE)
    if known.member_id != member_id:
        if member_id in draft.members:
            draft.lose(member_id, Departure.LEFT)
        draft.succeed(known.member_id, fresh)
    return _proceed(draft, event, known, _updated(fresh, event, cluster))


def _updated(member: ConsumerMember, event: ConsumerGroupHeartbeat, cluster: Cluster) -> ConsumerMember:
    """Return the member with the values of the request; what the request leaves out stays."""
    names, pattern = event.subscribed_topic_names, event.subscribed_topic_regex
    joins = event.member_epoch == JOIN_EPOCH
    if joins:
        names, pattern = names or (), pattern or ""
    pattern = member.subscribed_topic_regex if pattern is None else pattern
    return replace(
        member,
        instance_id=event.instance_id if joins or event.instance_id is not None else member.instance_id,
        rack_id=event.rack_id if joins or event.rack_id is not None else member.rack_id,
        client_id=event.client_id,
        client_host=event.client_host,
        principal=event.principal if pattern else None,
        rebalance_timeout_ms=(
            member.rebalance_timeout_ms if event.rebalance_timeout_ms == -1 else event.rebalance_timeout_ms
        ),
        subscribed_topic_names=(member.subscribed_topic_names if names is None else tuple(sorted(set(names)))),
        subscribed_topic_regex=pattern,
        server_assignor=(
            event.server_assignor if joins or event.server_assignor is not None else member.server_assignor
        ),
        untaken=_untaken(member, event, cluster),
        connection_number=event.connection_number,
        connection_id=event.connection_id,
    )


def _untaken(member: ConsumerMember, event: ConsumerGroupHeartbeat, cluster: Cluster) -> Partitions:
    """Return the partitions that the member has still not reported as owned, without those of deleted topics."""
    if not member.untaken:
        return NOTHING
    left = difference(member.untaken, event.owned or NOTHING)
    return {topic_id: indexes for topic_id, indexes in left.items() if topic_id in cluster.by_id}


def _proceed(
    draft: Draft, event: ConsumerGroupHeartbeat, before: ConsumerMember | None, member: ConsumerMember
) -> Step[ConsumerGroup]:
    """Move the member one step closer to its target and answer it. `before` is the member as it was, None if it is new;
    `member` is the member with the values of the request.
    """
    joins = event.member_epoch == JOIN_EPOCH
    full = (
        event.rebalance_timeout_ms != -1
        and (event.subscribed_topic_names is not None or event.subscribed_topic_regex is not None)
        and event.owned is not None
    )
    after = proceed(draft, before, member, event.owned, member.untaken if full or member.is_to_take else NOTHING)
    awaited = intersection(after.untaken, after.pending_revocation)
    told = after.assigned
    if event.owned == told:
        # Either the member is still taking over the awaited partitions, or the response that assigned them was lost. A
        # response that lists just what the member owns cannot be acknowledged. So the response lists the awaited
        # partitions (again), and the member must release them after that.
        told = union(told, awaited)
    has_caught_up = before is not None and not awaited and meet(before.untaken, after.pending_revocation)
    is_told_more = told != after.assigned
    # If a member has not reported all that it was assigned, the response that assigned it may have been lost. A client
    # that is still taking the partitions over ignores an assignment that it already has.
    may_not_know = event.owned is None and bool(after.untaken)
    tell = joins or full or has_caught_up or is_told_more or may_not_know or after.assigned != member.assigned
    is_to_take = is_told_more if tell else after.is_to_take and bool(awaited)
    if is_to_take is not after.is_to_take:
        draft.put(replace(after, is_to_take=is_to_take))
    draft.answer(
        event.request_id,
        ConsumerGroupHeartbeatReply(
            ErrorCode.NONE,
            None,
            after.member_id,
            after.member_epoch,
            _interval_ms(after, draft),
            told if tell else None,
        ),
    )
    return draft.seal()


def proceed(
    draft: Draft,
    before: ConsumerMember | None,
    member: ConsumerMember,
    owned: Partitions | None,
    doubted: Partitions,
) -> ConsumerMember:
    """Apply a request that reports `owned` to the group and return the member after it. Although the report omits the
    `doubted` partitions, the member may be about to take them over.
    """
    # A member that joins again under its id has lost its partitions, and may no longer commit for them.
    draft.put(member, HandoffEnd.SOURCE_LEFT if member.member_epoch == JOIN_EPOCH else HandoffEnd.ACKNOWLEDGED)
    is_other = before is None or subscription_of(before) != subscription_of(member)
    target_is_old = draft.group_epoch > draft.assignment_epoch
    look = is_other or target_is_old or has_news(draft.before, draft.cluster)
    topics_changed = look and draft.see_topics(draft.to_postpone(member) if is_other else "")
    subscription_changed = is_other and (before is None or draft.wants_others(before, member))
    if before is None:
        draft.raise_epoch(Trigger.MEMBER_JOINED, member.member_id)
    elif subscription_changed:
        draft.raise_epoch(Trigger.SUBSCRIPTION_CHANGED, member.member_id)
    elif topics_changed and not target_is_old:
        draft.raise_epoch(Trigger.SUBSCRIPTION_CHANGED if draft.before.postponed else Trigger.TOPICS_CHANGED)
    elif not draft.assignor and draft.is_unfit():
        # A static member has turned a classic group that was about to rebalance into a consumer group.
        draft.raise_epoch(Trigger.MEMBER_JOINED, member.member_id)
    if draft.group_epoch > draft.assignment_epoch:
        draft.compute_target()
    after = reconcile(
        member,
        draft.target.get(member.member_id, NOTHING),
        draft.assignment_epoch,
        draft.owners,
        draft.topic_ids(subscription_of(member)),
        owned,
        doubted,
        subscription_changed,
    )
    after = retained(draft, member, after)
    if after is not member:
        draft.put(after)
        draft.tell(AssignmentGiven(after.member_id, after.member_epoch))
    draft.hear(member.member_id)
    draft.arm_rebalance(before, after)
    return after


def _interval_ms(member: ConsumerMember, draft: Draft) -> int:
    """A member that waits for partitions, or for its pattern, uses a shorter interval: the coordinator cannot push."""
    interval_ms = draft.settings.heartbeat_interval_ms
    if member.state is MemberState.UNRELEASED or (draft.postponed and member.subscribed_topic_regex == draft.postponed):
        return min(interval_ms, UNRELEASED_INTERVAL_MS)
    return interval_ms


def _leave(
    group: ConsumerGroup,
    event: ConsumerGroupHeartbeat,
    member: ConsumerMember,
    now_ms: int,
    settings: ConsumerSettings,
    cluster: Cluster,
) -> Step[ConsumerGroup]:
    """Remove the member. A static member that leaves for a while keeps its partitions, except those it was releasing,
    and its session continues. Other members are removed, and the next request computes the target again.
    """
    draft = Draft(group, now_ms, settings, cluster)
    if event.member_epoch == STATIC_LEAVE_EPOCH:
        draft.put(
            replace(
                member,
                member_epoch=STATIC_LEAVE_EPOCH,
                previous_member_epoch=STATIC_LEAVE_EPOCH,
                state=MemberState.STABLE,
                pending_revocation=NOTHING,
                untaken=NOTHING,
                undrained=NOTHING,
                connection_number=event.connection_number,
            ),
            HandoffEnd.SOURCE_LEFT,
        )
        draft.rebalance_deadlines.pop(member.member_id, None)
        draft.tell(MemberAway(member.member_id))
    else:
        draft.lose(member.member_id, Departure.LEFT)
    reply = ConsumerGroupHeartbeatReply(ErrorCode.NONE, None, member.member_id, event.member_epoch)
    draft.answer(event.request_id, reply)
    return draft.seal()
