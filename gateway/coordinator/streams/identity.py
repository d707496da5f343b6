"""Identity and rights of the member that sends a streams group's heartbeat (KIP-1071).

The one idea: a request is refused before the group is changed. Follows upstream's GroupCoordinatorService and
GroupMetadataManager, with their order of checks. A group that does not exist knows no members, because
GROUP_ID_NOT_FOUND is fatal to clients.
"""

from __future__ import annotations

from gateway.coordinator.member_epochs import JOIN_EPOCH, LEAVE_EPOCH, STATIC_LEAVE_EPOCH
from gateway.coordinator.settings import StreamsSettings
from gateway.coordinator.streams.model import StreamsGroup, StreamsGroupHeartbeat, StreamsMember
from protocol.errors import ErrorCode, KafkaError

MAX_HOST_BYTES = 1_024
"""Limit, in UTF-8, of the address at which a member answers interactive queries."""

MAX_TAGS_BYTES = 16_384
"""Limit, in UTF-8, of all tags of a member: they are stored whenever the member changes."""


def check_request(event: StreamsGroupHeartbeat) -> None:
    """Check the request. Raise KafkaError, with Kafka's texts if it has any."""
    if not event.member_id:
        raise _invalid("MemberId can't be empty.")
    if event.instance_id == "":
        raise _invalid("InstanceId can't be empty.")
    if event.rack_id == "":
        raise _invalid("RackId can't be empty.")
    if event.user_endpoint is not None and len(event.user_endpoint.host.encode()) > MAX_HOST_BYTES:
        raise _invalid(f"UserEndpoint's host is longer than {MAX_HOST_BYTES} bytes")
    if sum(len(key.encode()) + len(value.encode()) for key, value in event.client_tags or ()) > MAX_TAGS_BYTES:
        raise _invalid(f"ClientTags are longer than {MAX_TAGS_BYTES} bytes")
    if event.member_epoch < STATIC_LEAVE_EPOCH:
        raise _invalid(f"MemberEpoch is {event.member_epoch}, but must be greater than or equal to -2.")
    if event.member_epoch == STATIC_LEAVE_EPOCH and event.instance_id is None:
        raise _invalid("InstanceId can't be null.")
    if event.member_epoch in (LEAVE_EPOCH, STATIC_LEAVE_EPOCH):
        return
    if event.rebalance_timeout_ms == 0 or event.rebalance_timeout_ms < -1:
        raise _invalid("RebalanceTimeoutMs must be positive.")
    _check_tasks(event)
    if event.member_epoch == JOIN_EPOCH:
        _check_join(event)
    elif event.topology is not None:
        raise _invalid("Topology can only be provided when (re-)joining.")
    _check_topology(event)


def find_member(group: StreamsGroup, event: StreamsGroupHeartbeat) -> StreamsMember:
    """Return the member that sends the request or leaves (any epoch but 0). Raise KafkaError."""
    member = _member_of(group, event)
    _check_not_overtaken(member, event.connection_number)
    if event.member_epoch not in (LEAVE_EPOCH, STATIC_LEAVE_EPOCH, member.member_epoch):
        # A response may have been lost: a member at the previous epoch is accepted if it owns nothing that it may not
        # own.
        owned = event.owned
        missed_answer = (
            event.member_epoch == member.previous_member_epoch and owned is not None and not owned - member.assigned
        )
        if not missed_answer:
            how = "greater" if event.member_epoch > member.member_epoch else "smaller"
            raise KafkaError(
                ErrorCode.FENCED_MEMBER_EPOCH,
                f"The streams group member has a {how} member epoch ({event.member_epoch}) than the one known by the "
                f"group coordinator ({member.member_epoch}). The member must abandon all its partitions and rejoin.",
            )
    return member


def check_join(group: StreamsGroup, event: StreamsGroupHeartbeat, settings: StreamsSettings) -> StreamsMember | None:
    """Return the member that a join (epoch 0) continues or replaces; None for a new member. Raise KafkaError."""
    owner = None if event.instance_id is None else _static_member(group, event.instance_id)
    if owner is not None:
        # A client whose first response was lost joins again under its own member id.
        if owner.member_id != event.member_id and owner.member_epoch != STATIC_LEAVE_EPOCH:
            raise KafkaError(
                ErrorCode.UNRELEASED_INSTANCE_ID,
                f"Static member {event.member_id} with instance id {event.instance_id} cannot join the group because "
                f"the instance id is owned by {owner.member_id} member.",
            )
        if owner.member_id == event.member_id:
            _check_not_overtaken(owner, event.connection_number)
        return owner
    known = group.members.get(event.member_id)
    if known is not None:
        _check_not_overtaken(known, event.connection_number)
    elif len(group.members) >= settings.max_size:
        raise KafkaError(ErrorCode.GROUP_MAX_SIZE_REACHED, f"the group has {settings.max_size} members already")
    return known


def _static_member(group: StreamsGroup, instance_id: str) -> StreamsMember | None:
    return next((each for each in group.members.values() if each.instance_id == instance_id), None)


def _member_of(group: StreamsGroup, event: StreamsGroupHeartbeat) -> StreamsMember:
    if event.instance_id is not None:
        member = _static_member(group, event.instance_id)
        if member is None:
            raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID, f"Instance id {event.instance_id} is unknown.")
        if member.member_id != event.member_id:
            raise KafkaError(
                ErrorCode.FENCED_INSTANCE_ID,
                f"Static member {event.member_id} with instance id {event.instance_id} was fenced by member "
                f"{member.member_id}.",
            )
        return member
    member = group.members.get(event.member_id)
    if member is None:
        raise KafkaError(
            ErrorCode.UNKNOWN_MEMBER_ID, f"Member {event.member_id} is not a member of group {group.group_id}."
        )
    return member


def _check_not_overtaken(member: StreamsMember, connection_number: int) -> None:
    """Refuse requests on a connection that the client has given up. They report tasks as they were before a response
    on the new one."""
    if connection_number < member.connection_number:
        raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "a newer connection of this member has spoken")


def _check_tasks(event: StreamsGroupHeartbeat) -> None:
    told = [tasks is not None for tasks in (event.active, event.standby, event.warmup)]
    if any(told) and not all(told):
        raise _invalid("ActiveTasks, StandbyTasks and WarmupTasks must be given together.")
    if event.warmup:
        raise _invalid("WarmupTasks are not supported.")


def _check_join(event: StreamsGroupHeartbeat) -> None:
    if event.rebalance_timeout_ms == -1:
        raise _invalid("RebalanceTimeoutMs must be provided in first request.")
    for tasks, name in ((event.active, "ActiveTasks"), (event.standby, "StandbyTasks")):
        if tasks:
            raise _invalid(f"{name} must be empty when (re-)joining.")
    if event.topology is None:
        raise _invalid("Topology must be non-null when (re-)joining.")


def _check_topology(event: StreamsGroupHeartbeat) -> None:
    if event.has_source_patterns:
        raise _invalid("Regular expressions for source topics are not supported.")
    if event.topology is None:
        return
    for subtopology in event.topology.subtopologies:
        for topic in subtopology.state_changelog_topics:
            if topic.partitions != 0:
                raise KafkaError(
                    ErrorCode.STREAMS_INVALID_TOPOLOGY,
                    f"Changelog topic {topic.name} must have an undefined partition count, "
                    f"but it is set to {topic.partitions}.",
                )


def _invalid(reason: str) -> KafkaError:
    return KafkaError(ErrorCode.INVALID_REQUEST, reason)
