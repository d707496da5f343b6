"""StreamsGroupHeartbeat: join, report, reconcile, leave; and how the group follows time.

The one idea: every heartbeat asks the same four questions in turn, as in a consumer group. Has anything changed that
the target follows from? Then the group epoch rises. Is the target older than the group epoch? Then it is computed
again. How far may this member come now? What must the response contain? A heartbeat without news answers all four with
one check and moves one deadline.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.coordinator.cluster import Cluster
from gateway.coordinator.facts import (
    AssignmentGiven,
    Departure,
    Fact,
    MemberAway,
    MemberChanged,
    MemberJoined,
    MemberRejoined,
    MemberReplaced,
    Trigger,
)
from gateway.coordinator.machine import Step
from gateway.coordinator.member_epochs import JOIN_EPOCH, LEAVE_EPOCH, STATIC_LEAVE_EPOCH, UNRELEASED_INTERVAL_MS
from gateway.coordinator.settings import StreamsSettings
from gateway.coordinator.silence import silence
from gateway.coordinator.streams.current_assignment import held_by_others, left_for_a_while, reconcile
from gateway.coordinator.streams.draft import Draft
from gateway.coordinator.streams.endpoints import partitions_by_endpoint
from gateway.coordinator.streams.identity import check_join, check_request, find_member
from gateway.coordinator.streams.model import (
    Endpoint,
    MemberState,
    StreamsGroup,
    StreamsGroupHeartbeat,
    StreamsGroupHeartbeatReply,
    StreamsMember,
    has_news,
)
from gateway.coordinator.streams.tasks import NO_TASKS, Tasks
from gateway.coordinator.streams.topology import InvalidTopologyError, StatusCode
from protocol.errors import ErrorCode, KafkaError

FIRST_EPOCH = 1


def heartbeat(
    group: StreamsGroup, event: StreamsGroupHeartbeat, now_ms: int, settings: StreamsSettings, cluster: Cluster
) -> Step[StreamsGroup]:
    try:
        check_request(event)
        if event.member_epoch in (LEAVE_EPOCH, STATIC_LEAVE_EPOCH):
            return _leave(group, event, find_member(group, event), now_ms, settings, cluster)
        if event.member_epoch == JOIN_EPOCH:
            return _join(group, event, check_join(group, event, settings), now_ms, settings, cluster)
        member = find_member(group, event)
        _check_owned(group, event)
    except KafkaError as refused:
        return Step(group, ((event.request_id, StreamsGroupHeartbeatReply(refused.code, refused.message)),))
    silent = silence(
        member.member_id, settings.session_timeout_ms, group.session_deadlines.get(member.member_id), now_ms
    )
    if _has_no_news(group, event, member, cluster, settings):
        return _keep_alive(group, event, member, now_ms, settings, silent)
    draft = Draft(group, now_ms, settings, cluster)
    if member.member_id not in group.unheard:
        draft.facts += silent
    return _proceed(draft, event, member, _updated(member, event))


def _has_no_news(
    group: StreamsGroup,
    event: StreamsGroupHeartbeat,
    member: StreamsMember,
    cluster: Cluster,
    settings: StreamsSettings,
) -> bool:
    return (
        member.state is MemberState.STABLE
        and event.member_epoch == member.member_epoch == group.assignment_epoch == group.group_epoch
        and group.is_ready
        and not group.awaits_members
        and group.shutdown_by is None
        and not event.shutdown_application
        and event.owned is None
        and event.rack_id is None
        and event.process_id is None
        and event.user_endpoint is None
        and event.client_tags is None
        and event.rebalance_timeout_ms == -1
        and event.connection_number == member.connection_number
        and event.endpoint_information_epoch == group.endpoint_epoch
        and settings.num_standby_replicas == group.standby_replicas
        and not _is_stale(group, member)
        and not has_news(group, cluster)
        and member.member_id not in group.unheard
    )


def _keep_alive(
    group: StreamsGroup,
    event: StreamsGroupHeartbeat,
    member: StreamsMember,
    now_ms: int,
    settings: StreamsSettings,
    silent: tuple[Fact, ...],
) -> Step[StreamsGroup]:
    deadlines = group.session_deadlines.moved(member.member_id, now_ms + settings.session_timeout_ms)
    reply = StreamsGroupHeartbeatReply(
        ErrorCode.NONE,
        None,
        member.member_id,
        member.member_epoch,
        settings.heartbeat_interval_ms,
        endpoint_information_epoch=group.endpoint_epoch,
    )
    return Step(replace(group, session_deadlines=deadlines), ((event.request_id, reply),), silent)


def _join(
    group: StreamsGroup,
    event: StreamsGroupHeartbeat,
    known: StreamsMember | None,
    now_ms: int,
    settings: StreamsSettings,
    cluster: Cluster,
) -> Step[StreamsGroup]:
    """Join a member. A known member that joins again under its id has lost what it owned. A member that takes the place
    of a static member that left for a while gets what that member had.

    The topology of a group with members does not change. A member with an older topology gets a status that says so,
    and one with any other topology is refused, as upstream does. In a group without members the newcomer's topology
    replaces the old one, which upstream refuses too. Raise KafkaError.
    """
    draft = Draft(group, now_ms, settings, cluster)
    topology = event.topology
    if topology is not None and (group.topology is None or not group.members):
        try:
            draft.take(topology)
        except InvalidTopologyError as invalid:
            raise KafkaError(ErrorCode.STREAMS_INVALID_TOPOLOGY, str(invalid)) from invalid
    elif (
        topology is not None
        and group.topology is not None
        and topology.epoch >= group.topology.epoch
        and topology != group.topology
    ):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Topology updates are not supported yet.")
    if known is None:
        draft.tell(MemberJoined(event.member_id, event.instance_id))
        return _proceed(draft, event, None, _updated(StreamsMember(event.member_id), event))
    if known.member_epoch == STATIC_LEAVE_EPOCH:
        draft.tell(MemberReplaced(event.member_id, known.member_id, known.instance_id or ""))
        back = replace(known, member_id=event.member_id, member_epoch=0, previous_member_epoch=0, connection_number=-1)
        if known.member_id != event.member_id:
            if event.member_id in draft.members:
                draft.lose_all({event.member_id: Departure.LEFT})
            draft.succeed(known.member_id, back)
        return _proceed(draft, event, known, _updated(back, event))
    draft.tell(MemberRejoined(event.member_id))
    fresh = replace(
        known,
        member_epoch=0,
        previous_member_epoch=0,
        state=MemberState.STABLE,
        assigned=NO_TASKS,
        pending_revocation=NO_TASKS,
        active_since=(),
    )
    return _proceed(draft, event, known, _updated(fresh, event))


def _check_owned(group: StreamsGroup, event: StreamsGroupHeartbeat) -> None:
    """Raise KafkaError if a reported task does not exist. Do nothing as long as the group's tasks are unknown."""
    if group.configured is None or not group.configured.is_ready or event.owned is None:
        return
    counts = group.configured.task_counts
    for subtopology_id, index in event.owned.active | event.owned.standby:
        if not 0 <= index < counts.get(subtopology_id, 0):
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"there is no task {subtopology_id}_{index}")


def _updated(member: StreamsMember, event: StreamsGroupHeartbeat) -> StreamsMember:
    """Return the member with the values of the request; what the request leaves out stays."""
    timeout_ms = event.rebalance_timeout_ms
    return replace(
        member,
        instance_id=member.instance_id if event.instance_id is None else event.instance_id,
        rack_id=member.rack_id if event.rack_id is None else event.rack_id,
        client_id=event.client_id,
        client_host=event.client_host,
        rebalance_timeout_ms=member.rebalance_timeout_ms if timeout_ms == -1 else timeout_ms,
        topology_epoch=member.topology_epoch if event.topology is None else event.topology.epoch,
        process_id=member.process_id if event.process_id is None else event.process_id,
        user_endpoint=member.user_endpoint if event.user_endpoint is None else event.user_endpoint,
        client_tags=member.client_tags if event.client_tags is None else event.client_tags,
        connection_number=event.connection_number,
    )


def _proceed(
    draft: Draft, event: StreamsGroupHeartbeat, before: StreamsMember | None, member: StreamsMember
) -> Step[StreamsGroup]:
    """Move the member one step closer to its target and answer it. `before` is the member as it was, None if it is new;
    `member` is the member with the values of the request.
    """
    if before is None and not draft.members:
        draft.begin_delay()
        # A group has its first epoch before its first member has raised it, as in Kafka.
        draft.group_epoch = max(draft.group_epoch, FIRST_EPOCH)
    draft.put(member)
    if event.shutdown_application and draft.shutdown_by is None:
        draft.shutdown_by = member.member_id
        draft.tell(MemberChanged(member.member_id))
    _decide(draft, before, member)
    after = member
    if member.state is not MemberState.STABLE or member.member_epoch != draft.assignment_epoch:
        after = reconcile(
            member,
            draft.target.get(member.member_id, NO_TASKS),
            draft.assignment_epoch,
            held_by_others(member, draft.members.values()),
            event.owned,
        )
    if after is not member:
        draft.put(after)
        draft.tell(AssignmentGiven(after.member_id, after.member_epoch))
    draft.hear(member.member_id)
    draft.arm_rebalance(before, after)
    # A member that reports other tasks than it was assigned may have missed the response.
    is_told = (
        event.member_epoch == JOIN_EPOCH
        or after.assigned != member.assigned
        or (event.owned is not None and event.owned != after.assigned)
    )
    if _read_behind_endpoint(before) != _read_behind_endpoint(after):
        draft.endpoint_epoch += 1
    draft.answer(event.request_id, _reply(draft, event, after, is_told=is_told))
    return draft.seal()


def _decide(draft: Draft, before: StreamsMember | None, member: StreamsMember) -> None:
    """Raise the epoch if the target now follows from something else, and compute the target again if it is old."""
    target_is_old = draft.group_epoch > draft.assignment_epoch
    topics_changed = (target_is_old or draft.has_news()) and draft.see_topics()
    standby_replicas = draft.settings.num_standby_replicas
    if _is_over(draft):
        draft.end_delay()
        draft.raise_epoch(Trigger.MEMBER_JOINED)
    elif before is None and not (draft.awaits_members and (draft.before.members or draft.group_epoch == FIRST_EPOCH)):
        draft.raise_epoch(Trigger.MEMBER_JOINED, member.member_id)
    elif before is not None and _is_other(before, member):
        draft.raise_epoch(Trigger.SUBSCRIPTION_CHANGED, member.member_id)
    elif topics_changed and not target_is_old:
        draft.raise_epoch(Trigger.TOPICS_CHANGED)
    elif standby_replicas != draft.standby_replicas and not target_is_old:
        draft.raise_epoch(Trigger.SUBSCRIPTION_CHANGED)
    draft.standby_replicas = standby_replicas
    if draft.group_epoch > draft.assignment_epoch:
        draft.compute_target()


def _is_over(draft: Draft) -> bool:
    return draft.awaits_members and draft.delay_deadline_ms is not None and draft.delay_deadline_ms <= draft.now_ms


def _is_other(before: StreamsMember, after: StreamsMember) -> bool:
    """Return whether the member has changed a property that the assignment depends on."""

    def told(member: StreamsMember) -> tuple[object, ...]:
        return member.topology_epoch, member.process_id, member.rack_id, member.client_tags, member.user_endpoint

    return told(before) != told(after)


def _read_behind_endpoint(member: StreamsMember | None) -> tuple[Endpoint, Tasks] | None:
    if member is None or member.user_endpoint is None or not member.assigned:
        return None
    return member.user_endpoint, member.assigned


def _is_stale(group: StreamsGroup | Draft, member: StreamsMember) -> bool:
    return group.topology is not None and member.topology_epoch < group.topology.epoch


def _reply(
    draft: Draft, event: StreamsGroupHeartbeat, member: StreamsMember, *, is_told: bool
) -> StreamsGroupHeartbeatReply:
    status: list[tuple[StatusCode, str]] = []
    if draft.topology is not None and _is_stale(draft, member):
        detail = f"the member's topology has epoch {member.topology_epoch}, the group's {draft.topology.epoch}"
        status.append((StatusCode.STALE_TOPOLOGY, detail))
    configured = draft.configured
    if configured is not None and configured.status is not None:
        status.append((configured.status, configured.detail))
    if draft.shutdown_by is not None:
        status.append((StatusCode.SHUTDOWN_APPLICATION, f"member {draft.shutdown_by} asked all members to shut down"))
    if draft.awaits_members:
        status.append((StatusCode.ASSIGNMENT_DELAYED, "the group waits for its first members to join"))
    knows_endpoints = event.endpoint_information_epoch == draft.endpoint_epoch
    return StreamsGroupHeartbeatReply(
        ErrorCode.NONE,
        None,
        member.member_id,
        member.member_epoch,
        _interval_ms(member, draft.settings),
        tasks=member.assigned if is_told else None,
        status=tuple(status),
        missing_internal_topics=() if configured is None else configured.missing,
        endpoint_information_epoch=draft.endpoint_epoch,
        partitions_by_user_endpoint=None if knows_endpoints else partitions_by_endpoint(draft),
    )


def _interval_ms(member: StreamsMember, settings: StreamsSettings) -> int:
    if member.state is MemberState.UNRELEASED:
        return min(settings.heartbeat_interval_ms, UNRELEASED_INTERVAL_MS)
    return settings.heartbeat_interval_ms


def _leave(
    group: StreamsGroup,
    event: StreamsGroupHeartbeat,
    member: StreamsMember,
    now_ms: int,
    settings: StreamsSettings,
    cluster: Cluster,
) -> Step[StreamsGroup]:
    """Remove the member. A member that fails for good may ask in its last request that all members shut down. A static
    member that leaves for a while keeps its tasks, except those it was releasing, and its session continues.
    """
    draft = Draft(group, now_ms, settings, cluster)
    if event.shutdown_application:
        draft.shutdown_by = draft.shutdown_by or member.member_id
    if event.member_epoch == STATIC_LEAVE_EPOCH:
        draft.put(replace(left_for_a_while(member), connection_number=event.connection_number))
        draft.rebalance_deadlines.pop(member.member_id, None)
        draft.tell(MemberAway(member.member_id))
    else:
        draft.lose_all({member.member_id: Departure.LEFT})
    reply = StreamsGroupHeartbeatReply(ErrorCode.NONE, None, member.member_id, event.member_epoch)
    draft.answer(event.request_id, reply)
    return draft.seal()


# --- time ------------------------------------------------------------------------------------------------------------


def tick(group: StreamsGroup, cluster: Cluster, now_ms: int, settings: StreamsSettings) -> Step[StreamsGroup]:
    """Remove members that were silent for their session, or did not release tasks in time. End the initial delay:
    the members are assigned the tasks that existed at the time of the last request."""
    departures = dict.fromkeys(group.session_deadlines.due(now_ms), Departure.SESSION_EXPIRED)
    for member_id, at_ms in group.rebalance_deadlines.items():
        if at_ms <= now_ms:
            departures.setdefault(member_id, Departure.NOT_REVOKED)
    delay_is_over = group.delay_deadline_ms is not None and group.delay_deadline_ms <= now_ms
    if not departures and not delay_is_over:
        return Step(group)
    draft = Draft(group, now_ms, settings, cluster)
    if departures:
        # In the order in which the members joined: a step depends only on its values.
        draft.lose_all({key: departures[key] for key in group.members if key in departures})
    if delay_is_over and draft.members:
        if draft.configured is None:
            draft.see_topics()
        draft.end_delay()
        draft.raise_epoch(Trigger.MEMBER_JOINED)
        draft.compute_target()
    return draft.seal()


def next_deadline(group: StreamsGroup) -> int | None:
    others = (group.session_deadlines.earliest(), group.delay_deadline_ms)
    deadlines = (*group.rebalance_deadlines.values(), *(at_ms for at_ms in others if at_ms is not None))
    return min(deadlines, default=None)


def postponed(group: StreamsGroup, by_ms: int) -> StreamsGroup:
    delay_ms = group.delay_deadline_ms
    return replace(
        group,
        session_deadlines=group.session_deadlines.later(by_ms),
        rebalance_deadlines={key: at_ms + by_ms for key, at_ms in group.rebalance_deadlines.items()},
        delay_deadline_ms=None if delay_ms is None else delay_ms + by_ms,
    )
