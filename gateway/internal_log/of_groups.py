"""A group and its committed offsets as the records that Kafka keeps in `__consumer_offsets`.

The one idea: the functions here yield the complete state of one group as keys and values, in the order in which Kafka
first writes them. The writer finds out which of them are new. The bytes are Kafka's
(`protocol/coordinator_records.py`).

A classic group in a rebalance has no record of its own. Kafka writes one when the rebalance has settled, and until then
the previous record remains valid (`UNSETTLED`). Not written: the resolved topics of patterns (KIP-848) and the
positions of share groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from uuid import UUID

from gateway.coordinator.classic.model import Group, GroupState, Member
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerMember
from gateway.coordinator.consumer.model import MemberState as ConsumerMemberState
from gateway.coordinator.consumer.partitions import NOTHING, Partitions
from gateway.coordinator.machine import Value
from gateway.coordinator.share.model import ShareGroup
from gateway.coordinator.streams.model import MemberState as StreamsMemberState
from gateway.coordinator.streams.model import StreamsGroup, StreamsMember
from gateway.coordinator.streams.tasks import NO_TASKS, Task
from gateway.coordinator.streams.topology import Subtopology, TopicInfo
from gateway.internal_log.record import UNSETTLED, Entry
from protocol import coordinator_records as log
from protocol.coordinator_records import Kind, encode_key, encode_value
from storage.types import OffsetAsStored

CLASSIC_VERSION, OFFSET_VERSION, EXPIRING_OFFSET_VERSION = 3, 4, 1
"""Versions of the values that Kafka writes; all other values have version 0."""

_CONSUMER_STATES = {
    ConsumerMemberState.STABLE: 0,
    ConsumerMemberState.UNREVOKED: 1,
    ConsumerMemberState.UNRELEASED: 2,
}
_STREAMS_STATES = {
    StreamsMemberState.STABLE: 1,
    StreamsMemberState.UNREVOKED: 2,
    StreamsMemberState.UNRELEASED: 3,
}
_SHARE_STABLE = 0


def records_of(group: Value, changed_ms: int) -> Iterator[Entry]:
    """Yield the records of the group without its offsets. `changed_ms` is the time of its last state change."""
    match group:
        case Group():
            yield from _classic(group, changed_ms)
        case ConsumerGroup():
            yield from _consumer(group)
        case ShareGroup():
            yield from _share(group)
        case StreamsGroup():
            yield from _streams(group)
        case _:
            raise TypeError(f"no records are known of a {type(group).__name__}")


def offset_entry(group_id: str, offset: OffsetAsStored) -> tuple[bytes, bytes]:
    key = log.OffsetCommitKey(group=group_id, topic=offset.topic, partition=offset.partition_index)
    expires = offset.expire_timestamp_ms is not None
    value = log.OffsetCommitValue(
        offset=offset.committed_offset,
        leader_epoch=offset.leader_epoch,
        metadata=offset.metadata,
        commit_timestamp=offset.commit_timestamp_ms,
        expire_timestamp=-1 if offset.expire_timestamp_ms is None else offset.expire_timestamp_ms,
        topic_id=offset.topic_id,
    )
    version = EXPIRING_OFFSET_VERSION if expires else OFFSET_VERSION
    return encode_key(log.OFFSET_COMMIT, key), encode_value(log.OFFSET_COMMIT, version, value)


def beginning_of(group: Value, changed_ms: int) -> Iterator[Entry]:
    """Yield what Kafka wrote when the group was created, if that differs from the present state. For a classic group
    this is the empty group. A log that contains the group must begin with this record."""
    if isinstance(group, Group) and _is_joined(group) and (group.generation_id > 0 or group.members):
        yield _classic_entry(group.group_id, log.GroupMetadataValue(protocol=None, leader=None), changed_ms)


# --- classic ------------------------------------------------------------------------------------------------------


def _is_joined(group: Group) -> bool:
    """True if some member has ever joined the group. A group that has only offsets has no record but theirs."""
    return group.protocol_type is not None or group.generation_id > 0 or bool(group.members)


def _classic(group: Group, changed_ms: int) -> Iterator[Entry]:
    if not _is_joined(group):
        return
    if group.state not in (GroupState.STABLE, GroupState.EMPTY):
        yield encode_key(log.GROUP_METADATA, log.GroupMetadataKey(group=group.group_id)), UNSETTLED
        return
    members = sorted(group.members.values(), key=lambda member: member.position)
    value = log.GroupMetadataValue(
        protocol_type=group.protocol_type or "",
        generation=group.generation_id,
        protocol=group.protocol_name,
        leader=group.leader_id,
        members=tuple(_classic_member(member, group.protocol_name) for member in members),
    )
    yield _classic_entry(group.group_id, value, changed_ms)


def _classic_entry(group_id: str, value: log.GroupMetadataValue, changed_ms: int) -> Entry:
    dated = log.GroupMetadataValue(
        protocol_type=value.protocol_type,
        generation=value.generation,
        protocol=value.protocol,
        leader=value.leader,
        current_state_timestamp=changed_ms,
        members=value.members,
    )
    key = log.GroupMetadataKey(group=group_id)
    return encode_key(log.GROUP_METADATA, key), encode_value(log.GROUP_METADATA, CLASSIC_VERSION, dated)


def _classic_member(member: Member, protocol_name: str | None) -> log.MemberMetadata:
    return log.MemberMetadata(
        member_id=member.member_id,
        group_instance_id=member.group_instance_id,
        client_id=member.client_id,
        client_host=member.client_host,
        rebalance_timeout=member.rebalance_timeout_ms,
        session_timeout=member.session_timeout_ms,
        subscription=next((metadata for name, metadata in member.protocols if name == protocol_name), b""),
        assignment=member.assignment,
    )


# --- consumer -----------------------------------------------------------------------------------------------------


def _consumer(group: ConsumerGroup) -> Iterator[Entry]:
    for member in group.members.values():
        yield _of_member(log.CONSUMER_MEMBER, group.group_id, member.member_id, _consumer_member(member))
    epoch = log.ConsumerEpochValue(epoch=group.group_epoch, metadata_hash=_int64(group.metadata_hash))
    yield _of_group(log.CONSUMER_GROUP, group.group_id, epoch)
    yield from _targets(log.CONSUMER_TARGET, log.CONSUMER_TARGET_EPOCH, group)
    for member in group.members.values():
        held = log.ConsumerAssignmentValue(
            member_epoch=member.member_epoch,
            previous_member_epoch=member.previous_member_epoch,
            state=_CONSUMER_STATES[member.state],
            assigned_partitions=_partitions(member.assigned),
            partitions_pending_revocation=_partitions(member.pending_revocation),
        )
        yield _of_member(log.CONSUMER_ASSIGNMENT, group.group_id, member.member_id, held)


def _consumer_member(member: ConsumerMember) -> log.ConsumerMemberValue:
    classic = None
    if member.classic is not None:
        protocols = tuple(
            log.ClassicProtocol(name=name, metadata=metadata) for name, metadata in member.classic.protocols
        )
        classic = log.ClassicMemberMetadata(
            session_timeout_ms=member.classic.session_timeout_ms, supported_protocols=protocols
        )
    return log.ConsumerMemberValue(
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=member.subscribed_topic_names,
        subscribed_topic_regex=member.subscribed_topic_regex,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        server_assignor=member.server_assignor,
        classic_member_metadata=classic,
    )


# --- share --------------------------------------------------------------------------------------------------------


def _share(group: ShareGroup) -> Iterator[Entry]:
    for member in group.members.values():
        value = log.ShareMemberValue(
            rack_id=member.rack_id,
            client_id=member.client_id,
            client_host=member.client_host,
            subscribed_topic_names=member.subscribed_topic_names,
        )
        yield _of_member(log.SHARE_MEMBER, group.group_id, member.member_id, value)
    epoch = log.ShareEpochValue(epoch=group.group_epoch, metadata_hash=_int64(group.metadata_hash))
    yield _of_group(log.SHARE_GROUP, group.group_id, epoch)
    yield from _targets(log.SHARE_TARGET, log.SHARE_TARGET_EPOCH, group)
    for member in group.members.values():
        held = log.ShareAssignmentValue(
            member_epoch=member.member_epoch,
            previous_member_epoch=member.previous_member_epoch,
            state=_SHARE_STABLE,
            assigned_partitions=_partitions(member.assigned),
        )
        yield _of_member(log.SHARE_ASSIGNMENT, group.group_id, member.member_id, held)


# --- streams ------------------------------------------------------------------------------------------------------


def _streams(group: StreamsGroup) -> Iterator[Entry]:
    for member in group.members.values():
        yield _of_member(log.STREAMS_MEMBER, group.group_id, member.member_id, _streams_member(member))
    if group.topology is not None:
        topology = log.StreamsTopologyValue(
            epoch=group.topology.epoch, subtopologies=tuple(map(_subtopology, group.topology.subtopologies))
        )
        yield _of_group(log.STREAMS_TOPOLOGY, group.group_id, topology)
    epoch = log.StreamsEpochValue(
        epoch=group.group_epoch,
        metadata_hash=_int64(group.metadata_hash),
        validated_topology_epoch=group.topology.epoch if group.is_ready and group.topology is not None else -1,
    )
    yield _of_group(log.STREAMS_GROUP, group.group_id, epoch)
    for member_id in group.members:
        target = group.target.get(member_id, NO_TASKS)
        value = log.StreamsTargetValue(
            active_tasks=_target_tasks(target.active), standby_tasks=_target_tasks(target.standby)
        )
        yield _of_member(log.STREAMS_TARGET, group.group_id, member_id, value)
    assigned = log.AssignmentEpochValue(assignment_epoch=group.assignment_epoch)
    yield _of_group(log.STREAMS_TARGET_EPOCH, group.group_id, assigned)
    for member in group.members.values():
        since = {task: epoch for epoch, tasks in member.active_since for task in tasks}
        held = log.StreamsAssignmentValue(
            member_epoch=member.member_epoch,
            previous_member_epoch=member.previous_member_epoch,
            state=_STREAMS_STATES[member.state],
            active_tasks=_held_tasks(member.assigned.active, since, member.member_epoch),
            standby_tasks=_held_tasks(member.assigned.standby),
            active_tasks_pending_revocation=_held_tasks(member.pending_revocation.active, since, member.member_epoch),
            standby_tasks_pending_revocation=_held_tasks(member.pending_revocation.standby),
        )
        yield _of_member(log.STREAMS_ASSIGNMENT, group.group_id, member.member_id, held)


def _streams_member(member: StreamsMember) -> log.StreamsMemberValue:
    endpoint = member.user_endpoint
    return log.StreamsMemberValue(
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        topology_epoch=member.topology_epoch,
        process_id=member.process_id,
        user_endpoint=None if endpoint is None else log.StreamsEndpoint(host=endpoint.host, port=endpoint.port),
        client_tags=tuple(log.KeyValue(key=key, value=value) for key, value in member.client_tags),
    )


def _subtopology(each: Subtopology) -> log.StreamsSubtopology:
    repartitioned = [topic.name for topic in each.repartition_source_topics]
    return log.StreamsSubtopology(
        subtopology_id=each.subtopology_id,
        source_topics=each.source_topics,
        state_changelog_topics=tuple(map(_internal_topic, each.state_changelog_topics)),
        repartition_sink_topics=each.repartition_sink_topics,
        repartition_source_topics=tuple(map(_internal_topic, each.repartition_source_topics)),
        copartition_groups=tuple(
            log.CopartitionGroup(
                source_topics=_positions(each.source_topics, names),
                repartition_source_topics=_positions(repartitioned, names),
            )
            for names in each.copartition_groups
        ),
    )


def _positions(topics: Sequence[str], names: frozenset[str]) -> tuple[int, ...]:
    return tuple(position for position, name in enumerate(topics) if name in names)


def _internal_topic(topic: TopicInfo) -> log.InternalTopic:
    return log.InternalTopic(
        name=topic.name,
        partitions=topic.partitions,
        replication_factor=topic.replication_factor,
        topic_configs=tuple(log.KeyValue(key=key, value=value) for key, value in topic.topic_configs),
    )


def _by_subtopology(tasks: Iterable[Task]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for subtopology_id, partition in sorted(tasks):
        found.setdefault(subtopology_id, []).append(partition)
    return found


def _target_tasks(tasks: Iterable[Task]) -> tuple[log.TargetTasks, ...]:
    return tuple(
        log.TargetTasks(subtopology_id=subtopology_id, partitions=tuple(partitions))
        for subtopology_id, partitions in _by_subtopology(tasks).items()
    )


def _held_tasks(
    tasks: Iterable[Task], since: Mapping[Task, int] | None = None, epoch: int = 0
) -> tuple[log.HeldTasks, ...]:
    """Build the tasks of one member. `since` has the epochs at which active tasks were assigned; `epoch` is used for
    tasks that `since` does not contain."""
    return tuple(
        log.HeldTasks(
            subtopology_id=name,
            partitions=tuple(partitions),
            assignment_epochs=None if since is None else tuple(since.get((name, part), epoch) for part in partitions),
        )
        for name, partitions in _by_subtopology(tasks).items()
    )


# --- what they share ----------------------------------------------------------------------------------------------


def _targets(target: Kind, epoch: Kind, group: ConsumerGroup | ShareGroup) -> Iterator[Entry]:
    for member_id in group.members:
        value = log.TargetAssignmentValue(topic_partitions=_partitions(group.target.get(member_id, NOTHING)))
        yield _of_member(target, group.group_id, member_id, value)
    yield _of_group(epoch, group.group_id, log.AssignmentEpochValue(assignment_epoch=group.assignment_epoch))


def _of_group(kind: Kind, group_id: str, value: object) -> Entry:
    return encode_key(kind, log.GroupKey(group_id=group_id)), encode_value(kind, 0, value)


def _of_member(kind: Kind, group_id: str, member_id: str, value: object) -> Entry:
    return encode_key(kind, log.MemberKey(group_id=group_id, member_id=member_id)), encode_value(kind, 0, value)


def _partitions(partitions: Partitions) -> tuple[log.TopicPartitions, ...]:
    def by_topic(item: tuple[UUID, frozenset[int]]) -> int:
        return item[0].int

    return tuple(
        log.TopicPartitions(topic_id=topic_id, partitions=tuple(sorted(indexes)))
        for topic_id, indexes in sorted(partitions.items(), key=by_topic)
    )


def _int64(number: int) -> int:
    """Return the low 64 bits as a signed number."""
    return (number + 2**63) % 2**64 - 2**63
