"""Check that a group is of the type that a request is about.

The one idea: each type of group has APIs of its own. To them a group of another type does not exist, and admin clients
then try the next API.
"""

from __future__ import annotations

from typing import TypeVar

from gateway.coordinator.consumer.model import ConsumerGroup
from gateway.coordinator.machine import Value
from gateway.coordinator.share.model import ShareGroup
from gateway.coordinator.streams.model import StreamsGroup
from protocol.errors import ErrorCode, KafkaError

G = TypeVar("G", ConsumerGroup, ShareGroup, StreamsGroup)

_NAMES = {ConsumerGroup: "consumer", ShareGroup: "share", StreamsGroup: "streams"}


def of_type(kind: type[G], group_id: str, group: Value | KafkaError) -> G:
    """Return the group that a view found. Raise the view's KafkaError, INVALID_GROUP_ID for an empty name, or
    GROUP_ID_NOT_FOUND."""
    if not group_id:
        raise KafkaError(ErrorCode.INVALID_GROUP_ID, "the group has no name")
    if isinstance(group, KafkaError):
        raise group
    if not group.exists:
        raise KafkaError(ErrorCode.GROUP_ID_NOT_FOUND, f"Group {group_id} not found.")
    if not isinstance(group, kind):
        raise KafkaError(ErrorCode.GROUP_ID_NOT_FOUND, f"Group {group_id} is not a {_NAMES[kind]} group.")
    return group
