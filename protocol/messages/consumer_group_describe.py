"""ConsumerGroupDescribe: state, epochs, members, assignments and targets of KIP-848 groups.

Version 1 adds the protocol that each member speaks.
"""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int8, int16, int32, message, nested, string, struct, uuid


@message(ApiKey.CONSUMER_GROUP_DESCRIBE, versions="0-1", flexible="0+")
class ConsumerGroupDescribeRequest:
    group_ids: tuple[str, ...] = array(string)
    include_authorized_operations: bool = boolean()


@struct
class TopicPartitions:
    topic_id: UUID = uuid()
    topic_name: str = string()
    partitions: tuple[int, ...] = array(int32)


@struct
class Assignment:
    topic_partitions: tuple[TopicPartitions, ...] = array(TopicPartitions)


@struct
class Member:
    member_id: str = string()
    instance_id: str | None = string(nullable="0+", default=None)
    rack_id: str | None = string(nullable="0+", default=None)
    member_epoch: int = int32()
    client_id: str = string()
    client_host: str = string()
    subscribed_topic_names: tuple[str, ...] = array(string)
    subscribed_topic_regex: str | None = string(nullable="0+", default=None)
    assignment: Assignment = nested(Assignment)
    target_assignment: Assignment = nested(Assignment)
    member_type: int = int8(versions="1+", default=-1)


@struct
class DescribedGroup:
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    group_id: str = string()
    group_state: str = string()
    group_epoch: int = int32()
    assignment_epoch: int = int32()
    assignor_name: str = string()
    members: tuple[Member, ...] = array(Member)
    authorized_operations: int = int32(default=-0x80000000)


@message(ApiKey.CONSUMER_GROUP_DESCRIBE, versions="0-1", flexible="0+")
class ConsumerGroupDescribeResponse:
    throttle_time_ms: int = int32()
    groups: tuple[DescribedGroup, ...] = array(DescribedGroup)
