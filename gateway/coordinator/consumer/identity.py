"""Identity and rights of the member that sends a heartbeat: the error matrix of KIP-848.

The one idea: a request is refused before the group is changed. Follows upstream's `GroupMetadataManager`, with three
differences that stock clients need. A group that does not exist knows no members (GROUP_ID_NOT_FOUND is fatal to
clients). A member that joins again under its own id is trusted to own nothing. So is a static member whose first join
was answered but whose answer was lost.
"""

from __future__ import annotations

from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerGroupHeartbeat, ConsumerMember
from gateway.coordinator.consumer.partitions import contains
from gateway.coordinator.consumer.topics import MAX_PATTERN_SHOWN, InvalidPatternError, compile_pattern
from gateway.coordinator.member_epochs import JOIN_EPOCH, STATIC_LEAVE_EPOCH
from gateway.coordinator.settings import ConsumerSettings
from protocol.errors import ErrorCode, KafkaError

FIRST_VERSION_WITH_OWN_MEMBER_ID = 1


def check_request(event: ConsumerGroupHeartbeat, settings: ConsumerSettings) -> None:
    """Refuse requests that no group could accept, with Kafka's texts if it has any. Raise KafkaError."""
    epoch = event.member_epoch
    if event.instance_id == "":
        raise KafkaError(ErrorCode.INVALID_REQUEST, "InstanceId can't be empty.")
    if event.rack_id == "":
        raise KafkaError(ErrorCode.INVALID_REQUEST, "RackId can't be empty.")
    if not event.member_id and (event.version >= FIRST_VERSION_WITH_OWN_MEMBER_ID or epoch != JOIN_EPOCH):
        raise KafkaError(ErrorCode.INVALID_REQUEST, "MemberId can't be empty.")
    if event.rebalance_timeout_ms < -1:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "the rebalance timeout is negative")
    if epoch < STATIC_LEAVE_EPOCH:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "MemberEpoch is invalid.")
    if epoch == STATIC_LEAVE_EPOCH and event.instance_id is None:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "InstanceId can't be null.")
    if epoch == JOIN_EPOCH:
        if event.rebalance_timeout_ms == -1:
            raise KafkaError(ErrorCode.INVALID_REQUEST, "RebalanceTimeoutMs must be provided in first request.")
        if event.owned is None or event.owned:
            raise KafkaError(ErrorCode.INVALID_REQUEST, "TopicPartitions must be empty when (re-)joining.")
        if event.subscribed_topic_names is None and event.subscribed_topic_regex is None:
            raise KafkaError(
                ErrorCode.INVALID_REQUEST,
                "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining.",
            )
    if event.server_assignor is not None and event.server_assignor not in settings.assignors:
        raise KafkaError(
            ErrorCode.UNSUPPORTED_ASSIGNOR,
            f"ServerAssignor {event.server_assignor} is not supported. Supported assignors: "
            f"{', '.join(settings.assignors)}.",
        )
    if event.subscribed_topic_regex:
        try:
            compile_pattern(event.subscribed_topic_regex)
        except InvalidPatternError as invalid:
            shown = event.subscribed_topic_regex[:MAX_PATTERN_SHOWN]
            raise KafkaError(
                ErrorCode.INVALID_REGULAR_EXPRESSION,
                f"SubscribedTopicRegex `{shown}` is not a valid regular expression: {invalid}.",
            ) from invalid


def find_member(group: ConsumerGroup, event: ConsumerGroupHeartbeat) -> ConsumerMember:
    """Return the member that sends the request or leaves (any epoch but 0). Raise KafkaError."""
    if event.instance_id is None:
        member = group.members.get(event.member_id)
        if member is None:
            raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID, f"no member {event.member_id}")
    else:
        owner_id = group.instances.get(event.instance_id)
        if owner_id is None:
            raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID, f"no instance {event.instance_id}")
        if owner_id != event.member_id:
            raise KafkaError(ErrorCode.FENCED_INSTANCE_ID, f"instance {event.instance_id} is another member's")
        member = group.members[owner_id]
    if member.classic is not None:
        raise KafkaError(ErrorCode.UNKNOWN_MEMBER_ID, f"member {event.member_id} speaks the classic protocol")
    check_not_overtaken(member, event.connection_number)
    if event.member_epoch > JOIN_EPOCH:
        _check_epoch(member, event)
    return member


def _check_epoch(member: ConsumerMember, event: ConsumerGroupHeartbeat) -> None:
    """Check the member epoch. A response may have been lost: a member at the previous epoch is accepted if it owns
    nothing that it may not own."""
    epoch = event.member_epoch
    if epoch == member.member_epoch:
        return
    missed_answer = (
        epoch == member.previous_member_epoch and event.owned is not None and contains(member.assigned, event.owned)
    )
    if not missed_answer:
        raise KafkaError(
            ErrorCode.FENCED_MEMBER_EPOCH, f"member epoch is {member.member_epoch}, not {epoch}: join anew"
        )


def check_not_overtaken(member: ConsumerMember, connection_number: int) -> None:
    """Refuse requests on an older connection. A client opens a connection when it has given up its last one. A
    request that still arrives on the old one may report partitions as they were before a response on the new one."""
    if connection_number < member.connection_number:
        raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "a newer connection of this member has spoken")


def check_join(
    group: ConsumerGroup, event: ConsumerGroupHeartbeat, settings: ConsumerSettings
) -> ConsumerMember | None:
    """Return the member that a join (epoch 0) continues or replaces; None for a new member. Raise KafkaError."""
    owner_id = None if event.instance_id is None else group.instances.get(event.instance_id)
    if owner_id is not None:
        owner = group.members[owner_id]
        if owner_id != event.member_id and owner.member_epoch != STATIC_LEAVE_EPOCH and owner.classic is None:
            raise KafkaError(
                ErrorCode.UNRELEASED_INSTANCE_ID, f"instance {event.instance_id} is in use by another member"
            )
        if owner_id == event.member_id:
            check_not_overtaken(owner, event.connection_number)
        return owner
    known = group.members.get(event.member_id)
    if known is not None and known.classic is not None:
        raise KafkaError(ErrorCode.FENCED_MEMBER_EPOCH, f"member {event.member_id} speaks the classic protocol")
    if known is not None:
        check_not_overtaken(known, event.connection_number)
        return known
    if len(group.members) >= settings.max_size:
        raise KafkaError(ErrorCode.GROUP_MAX_SIZE_REACHED, f"the group has {settings.max_size} members already")
    return None
