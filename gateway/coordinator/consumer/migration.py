"""Online migration: a classic group with members becomes a consumer group, and a classic one again.

The one idea: no member loses the partitions that it reads. A member that may own a partition also owns it in the group
that follows. A classic member becomes a member that speaks the classic protocol in a consumer group
(`classic_members.py`), at the generation that it knows, and its next heartbeat asks it to rejoin. On the way back it
keeps its epoch as its generation until the first generation of the classic group begins. So heartbeats and commits go
on in both directions after any step. The group that follows waits for partitions that are still to be drained.

Follows `convertToConsumerGroup` and `convertToClassicGroup` of upstream's GroupMetadataManager.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from gateway.coordinator.classic.draft import Draft as ClassicDraft
from gateway.coordinator.classic.handoff import tell_if_pending
from gateway.coordinator.classic.join import SKIP_ASSIGNMENT, join
from gateway.coordinator.classic.model import Group, GroupState, Member, Watch
from gateway.coordinator.classic.observer import is_cooperative
from gateway.coordinator.classic.rebalance import prepare_rebalance
from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer import embedded, handoff, unsettled
from gateway.coordinator.consumer.draft import Draft
from gateway.coordinator.consumer.model import (
    ClassicProtocol,
    ConsumerGroup,
    ConsumerGroupHeartbeatReply,
    ConsumerMember,
    MemberState,
    Moving,
    Unsettled,
    subscription_of,
)
from gateway.coordinator.consumer.partitions import NOTHING, Partitions, difference, intersection, partitions_of, union
from gateway.coordinator.consumer.views import has_news, names_read
from gateway.coordinator.facts import Conversion, Departure, Fact, GroupTypeChanged, MemberId, MemberLeft, Trigger
from gateway.coordinator.handoff import Awaits, Handoff, HandoffAcknowledged, HandoffEnd, released
from gateway.coordinator.machine import Adopted, NotAdopted, Reply, RequestId, Step
from gateway.coordinator.member_epochs import STATIC_LEAVE_EPOCH
from gateway.coordinator.protocols import CONSUMER_PROTOCOL_TYPE, names, select_protocol
from gateway.coordinator.requests import JoinGroup, JoinReply, SyncReply
from gateway.coordinator.settings import MigrationPolicy, Settings
from protocol.consumer import Subscription, decode_assignment
from protocol.errors import ErrorCode, ProtocolError

UPGRADES = frozenset({MigrationPolicy.BIDIRECTIONAL, MigrationPolicy.UPGRADE})
DOWNGRADES = frozenset({MigrationPolicy.BIDIRECTIONAL, MigrationPolicy.DOWNGRADE})

SWITCH_ASSIGNOR = "Please refer to the documentation or switch to a default assignor before re-attempting the upgrade."
"""Upstream's wording, because upstream's tests compare it."""

CLASSIC = "classic"
CONSUMER = "consumer"


# --- upgrade --------------------------------------------------------------------------------------------------------


class CustomAssignorError(ProtocolError):
    """An assignment contains data that only its own assignor can produce."""


def upgraded(
    group: Group, cluster: Cluster, now_ms: int, settings: Settings
) -> Adopted[ConsumerGroup] | NotAdopted | None:
    """Convert this classic group with members into a consumer group. The conversion is refused if a subscription or an
    assignment cannot be read, or if it contains something that only its own assignor understands. If the policy or the
    group's size forbids it, return None, because upstream gives no reason for these refusals.

    The partitions of the members are known in every state: the leader assigned them, or cooperative members claimed
    them when they last joined. A held request is answered REBALANCE_IN_PROGRESS, so its client rejoins.
    """
    consumer_settings = settings.consumer_for(group.group_id)
    if (
        consumer_settings.migration_policy not in UPGRADES
        or group.protocol_type != CONSUMER_PROTOCOL_TYPE
        or len(group.members) > consumer_settings.max_size
        or any(not names(member.protocols) for member in group.members.values())
    ):
        return None
    if cluster.revision < group.watch.topics_revision:
        # The owners of topics that this node has not read yet would lose them.
        return NotAdopted(ConsumerGroupHeartbeatReply(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "topics are being read"))
    try:
        read = {member.member_id: _read(group, member) for member in group.members.values()}
        given = {key: _given(member, read[key], cluster) for key, member in group.members.items()}
    except CustomAssignorError:
        return _not_upgraded(group, "an unsupported custom assignor is in use. " + SWITCH_ASSIGNOR)
    except ProtocolError:
        return _not_upgraded(group, "the embedded consumer protocol is malformed.")
    held = _held(group, read, given, cluster)
    undrained, early = _undrained(group, held, cluster)
    started = ConsumerGroup(
        group.group_id,
        exists=True,
        group_epoch=group.generation_id,
        assignment_epoch=group.generation_id,
        topics_revision=cluster.revision,
    )
    draft = Draft(started, now_ms, consumer_settings, cluster)
    replies: list[tuple[RequestId, Reply]] = []
    for member in group.members.values():
        subscription = read[member.member_id]
        epoch = member.member_epoch or group.generation_id
        draft.put(
            ConsumerMember(
                member_id=member.member_id,
                instance_id=member.group_instance_id,
                rack_id=subscription.rack_id,
                client_id=member.client_id,
                client_host=member.client_host,
                rebalance_timeout_ms=member.rebalance_timeout_ms,
                subscribed_topic_names=tuple(sorted(set(subscription.topics))),
                member_epoch=epoch,
                previous_member_epoch=epoch,
                assigned=held[member.member_id],
                held_since=((epoch, held[member.member_id]),),
                undrained=partitions_of(
                    (topic_id, (index,)) for topic_id, index in undrained.get(member.member_id, ())
                ),
                classic=ClassicProtocol(member.session_timeout_ms, member.protocols),
                connection_number=member.connection_number,
                connection_id=member.connection_id,
            )
        )
        draft.target[member.member_id] = held[member.member_id]
        handoff.drains_on(draft, member.member_id, undrained.get(member.member_id, {}))
        draft.hear(member.member_id)
        if member.member_id in group.unheard:
            draft.unheard.add(member.member_id)
        if member.parked_join is not None:
            replies.append(
                (member.parked_join.request_id, JoinReply(ErrorCode.REBALANCE_IN_PROGRESS, member.member_id))
            )
        if member.parked_sync is not None:
            replies.append((member.parked_sync.request_id, SyncReply(ErrorCode.REBALANCE_IN_PROGRESS)))
    draft.unsettled = early
    # Only changes after this point count as news.
    draft.see_topics()
    before = ClassicDraft(group, now_ms, settings)
    for each in group.handoffs:
        tell_if_pending(before, each, HandoffEnd.SUPERSEDED)
    acknowledged = (HandoffAcknowledged(source, len(each)) for source, each in undrained.items())
    waits = unsettled.begun(early, group.generation_id, now_ms)
    return Adopted(draft.seal().group, Conversion.UPGRADE, tuple(replies), (*before.facts, *acknowledged, *waits))


def _not_upgraded(group: Group, reason: str) -> NotAdopted:
    message = f"Cannot upgrade classic group {group.group_id} to consumer group because {reason}"
    return NotAdopted(ConsumerGroupHeartbeatReply(ErrorCode.GROUP_ID_NOT_FOUND, message))


def _read(group: Group, member: Member) -> Subscription:
    """Read the member's subscription under the group's protocol, or under its first one before the group has a
    protocol."""
    chosen = next((each for each in member.protocols if each[0] == group.protocol_name), None)
    protocols = member.protocols if chosen is None else (chosen,)
    return embedded.subscription(ClassicProtocol(member.session_timeout_ms, protocols))


def _given(member: Member, subscription: Subscription, cluster: Cluster) -> Partitions:
    """Return the partitions assigned to the member. librdkafka copies the user data of its member's subscription
    into the assignment; that is nothing of the leader's own."""
    if not member.assignment:
        return NOTHING
    assignment = decode_assignment(member.assignment)
    if assignment.user_data and assignment.user_data != subscription.user_data:
        raise CustomAssignorError("an assignment has user data that its member did not say")
    return embedded.by_id(assignment.assigned_partitions, cluster)


def _held(
    group: Group, read: dict[MemberId, Subscription], given: dict[MemberId, Partitions], cluster: Cluster
) -> dict[MemberId, Partitions]:
    """Return the partitions that each member may own, each partition once. Assigned partitions take precedence over
    claimed ones, and claims of a later generation over older ones (KIP-429).

    A member that waits at the join barrier has just reported what it owns. So has a member that has not received its
    assignment, even if it waits for another to release partitions. An eager member that has joined owns only what it
    was assigned since.
    """
    cooperative = is_cooperative(group.protocol_name)
    claimed: dict[MemberId, Partitions] = {}
    for member in group.members.values():
        claim = embedded.by_id(read[member.member_id].owned_partitions, cluster) if cooperative else NOTHING
        absent = group.watch.absent.get(member.member_id, frozenset[tuple[str, int]]())
        claimed[member.member_id] = union(claim, embedded.by_id(((topic, (at,)) for topic, at in absent), cluster))
        waits = member.parked_join is not None or member.parked_sync is not None
        if waits or member.member_id in group.pending_sync | group.untold:
            given[member.member_id] = NOTHING
    held = dict.fromkeys(group.members, NOTHING)
    taken = NOTHING
    for shares in (given, claimed):
        for member_id in sorted(shares, key=lambda each: -read[each].generation_id):
            share = shares[member_id]
            free = difference(share, intersection(share, taken))
            held[member_id] = union(held[member_id], free)
            taken = union(taken, free)
    return held


def _undrained(
    group: Group, held: Mapping[MemberId, Partitions], cluster: Cluster
) -> tuple[dict[MemberId, dict[tuple[UUID, int], Handoff]], tuple[Unsettled, ...]]:
    """Return the partitions that sources have released and must still commit, by source, and those of them that
    another member received early."""
    found: dict[MemberId, dict[tuple[UUID, int], Handoff]] = {}
    early: list[Unsettled] = []
    for known in group.handoffs:
        each = known if known.behind is None else released(known)
        topic = cluster.topics.get(each.topic)
        if topic is None or each.source not in group.members or each.awaits is not Awaits.DRAIN or each.forced:
            continue
        shares = held.items()
        owner = next((key for key, share in shares if each.partition in share.get(topic.topic_id, ())), None)
        if owner is None:
            found.setdefault(each.source, {})[topic.topic_id, each.partition] = each
        elif owner != each.source:
            early.append(
                Unsettled(
                    topic.topic_id, each.partition, each.source, owner, each.mark, each.since_ms, each.deadline_ms
                )
            )
    return found, tuple(early)


# --- downgrade ------------------------------------------------------------------------------------------------------


def is_left_to_classic_members(
    before: ConsumerGroup, after: ConsumerGroup, facts: Sequence[Fact], settings: Settings, *, later: bool
) -> bool:
    """Return whether this step removed the last member of the consumer protocol, or an earlier one did if it may be
    `later`, and the remaining members can form a classic group.
    """
    consumer_settings = settings.consumer_for(after.group_id)
    return (
        (later or any(isinstance(fact, MemberLeft) for fact in facts))
        and consumer_settings.migration_policy in DOWNGRADES
        and bool(after.members)
        and all(member.classic is not None for member in after.members.values())
        and (later or any(member.classic is None for member in before.members.values()))
        and len(after.members) <= settings.group_max_size
    )


def downgraded(taken: Step[ConsumerGroup], cluster: Cluster, now_ms: int, settings: Settings) -> Step[Group]:
    """Turn the step into one that leads to a classic group and asks its members to rejoin."""
    group = taken.group
    draft = _classic_draft(group, cluster, now_ms, settings)
    draft.handoffs = tuple(_drains_on(group, cluster, settings.handoff_of(group.group_id).timeout_ms))
    draft.leader_id = next(iter(draft.members))
    draft.protocol_name = select_protocol(draft.members, draft.protocol_support, draft.members[draft.leader_id])
    prepare_rebalance(draft, Trigger.MIGRATED)
    begun = draft.seal()
    changed = GroupTypeChanged(CONSUMER, CLASSIC, Conversion.DOWNGRADE)
    before = Draft(group, now_ms, settings.consumer_for(group.group_id), cluster)
    handoff.superseded(before)
    return Step(begun.group, taken.replies, (*taken.facts, *before.facts, changed, *begun.facts))


def _classic_draft(group: ConsumerGroup, cluster: Cluster, now_ms: int, settings: Settings) -> ClassicDraft:
    """Return a stable classic group of the same members, who all speak the classic protocol. It has no leader yet."""
    draft = ClassicDraft(
        Group(
            group.group_id,
            state=GroupState.STABLE,
            exists=True,
            protocol_type=CONSUMER_PROTOCOL_TYPE,
            generation_id=group.group_epoch,
            watch=Watch(topics_revision=group.topics_revision),
        ),
        now_ms,
        settings,
    )
    for member in group.members.values():
        classic = _classic_member(member, cluster)
        draft.put(classic)
        draft.arm_session(classic)
    draft.unheard = set(group.unheard)
    return draft


def _drains_on(group: ConsumerGroup, cluster: Cluster, timeout_ms: int) -> Iterator[Handoff]:
    """Return the partitions that members have released and must still commit. Their deadlines do not change."""
    undrained: list[tuple[UUID, int, Moving | Unsettled]] = [
        (topic_id, index, moving)
        for (topic_id, index), moving in group.moving.items()
        if index in group.members[moving.source].undrained.get(topic_id, ())
    ]
    undrained += [(each.topic_id, each.partition, each) for each in group.unsettled]
    for topic_id, index, known in undrained:
        topic = cluster.by_id.get(topic_id)
        if topic is not None:
            yield Handoff(
                topic=topic.name,
                partition=index,
                source=known.source,
                target=None,
                generation_id=group.group_epoch,
                awaits=Awaits.DRAIN,
                mark=known.mark,
                since_ms=known.deadline_ms - timeout_ms,
                deadline_ms=known.deadline_ms,
            )


def _classic_member(member: ConsumerMember, cluster: Cluster) -> Member:
    """Return the classic member. Its assignment is all that it may own. No response contains it, but the member is
    assumed to hold it until it joins."""
    assert member.classic is not None
    version = embedded.subscription(member.classic).version
    return Member(
        member_id=member.member_id,
        group_instance_id=member.instance_id,
        client_id=member.client_id,
        client_host=member.client_host,
        session_timeout_ms=member.classic.session_timeout_ms,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        protocols=member.classic.protocols,
        assignment=embedded.assignment(union(member.assigned, member.pending_revocation), version, cluster),
        connection_number=member.connection_number,
        member_epoch=member.member_epoch,
    )


def replaces_the_last(group: ConsumerGroup, event: JoinGroup, settings: Settings) -> bool:
    """Return whether a static member returns with the classic protocol while no other member uses the consumer
    protocol.
    """
    consumer_settings = settings.consumer_for(group.group_id)
    owner_id = group.instances.get(event.group_instance_id or "")
    return (
        owner_id is not None
        and not event.member_id
        and consumer_settings.migration_policy in DOWNGRADES
        and len(group.members) <= settings.group_max_size
        and [key for key, member in group.members.items() if member.classic is None] == [owner_id]
    )


def downgraded_by(
    group: ConsumerGroup, event: JoinGroup, cluster: Cluster, now_ms: int, settings: Settings
) -> Step[ConsumerGroup | Group]:
    """Let the returning static member take its place in the classic group. It goes on with its share, without a
    rebalance, under three conditions: every member has its target, the newcomer reads the same topics, and it can be
    made the leader, so that one member watches the topics (KAFKA-13435). Otherwise it waits for the others."""
    owner_id = group.instances[event.group_instance_id or ""]
    if event.version >= SKIP_ASSIGNMENT and _is_settled(group, owner_id, cluster) and _goes_on(group, owner_id, event):
        return _taken_over(group, owner_id, event, cluster, now_ms, settings)
    draft = Draft(group, now_ms, settings.consumer_for(group.group_id), cluster)
    draft.lose(owner_id, Departure.LEFT, event.reason)
    left = draft.seal()
    if draft.members:
        begun = downgraded(left, cluster, now_ms, settings)
    else:
        empty = Group(group.group_id, exists=True, generation_id=draft.group_epoch)
        changed = GroupTypeChanged(CONSUMER, CLASSIC, Conversion.DOWNGRADE)
        begun = Step(empty, (), (*left.facts, changed))
    joined = join(begun.group, event, now_ms, settings)
    if joined.group is begun.group:
        return Step(group, joined.replies)
    return Step(joined.group, (*begun.replies, *joined.replies), (*begun.facts, *joined.facts))


def _is_settled(group: ConsumerGroup, owner_id: MemberId, cluster: Cluster) -> bool:
    """Return whether no member must release, take over or commit anything that others wait for. The owner may have
    left for a while: its process has gone either way."""
    return (
        not has_news(group, cluster)
        and not group.moving
        and not group.unsettled
        and all(
            member.state is MemberState.STABLE
            and (member.member_epoch == group.group_epoch or _is_away(member, owner_id))
            and member.assigned == group.target.get(member.member_id, NOTHING)
            for member in group.members.values()
        )
    )


def _is_away(member: ConsumerMember, owner_id: MemberId) -> bool:
    return member.member_id == owner_id and member.member_epoch == STATIC_LEAVE_EPOCH


def _goes_on(group: ConsumerGroup, owner_id: MemberId, event: JoinGroup) -> bool:
    """Return whether the new process wants the same topics as the previous one, and the other members support its
    protocol.
    """
    offered = ClassicProtocol(event.session_timeout_ms, event.protocols)
    others = (member.classic for member in group.members.values() if member.classic is not None)
    if (
        event.protocol_type != CONSUMER_PROTOCOL_TYPE
        or not names(event.protocols)
        or not embedded.compatible(offered, others)
    ):
        return False
    try:
        wanted = embedded.subscription(offered).topics
    except ProtocolError:
        return False
    owner = group.members[owner_id]
    return frozenset(wanted) == names_read(group, (subscription_of(owner),))


def _taken_over(
    group: ConsumerGroup, owner_id: MemberId, event: JoinGroup, cluster: Cluster, now_ms: int, settings: Settings
) -> Step[ConsumerGroup | Group]:
    """Give the returning static member, which leads a stable classic group, its share without a rebalance."""
    offered = ClassicProtocol(event.session_timeout_ms, event.protocols)
    owner = replace(group.members[owner_id], classic=offered, member_epoch=group.group_epoch)
    draft = _classic_draft(replace(group, members={**group.members, owner_id: owner}), cluster, now_ms, settings)
    draft.leader_id = owner_id
    draft.protocol_name = select_protocol(draft.members, draft.protocol_support, draft.members[owner_id])
    begun = draft.seal()
    joined = join(begun.group, event, now_ms, settings)
    if joined.group is begun.group:
        return Step(group, joined.replies)
    changed = GroupTypeChanged(CONSUMER, CLASSIC, Conversion.DOWNGRADE)
    return Step(joined.group, joined.replies, (changed, *begun.facts, *joined.facts))
