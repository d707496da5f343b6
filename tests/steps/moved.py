"""Answers of a broker that has just lost the leadership of a partition."""

from __future__ import annotations

import dataclasses

from protocol.errors import ErrorCode
from protocol.messages.list_offsets import ListOffsetsResponse


def without_leader(response: ListOffsetsResponse, partition: int = 0) -> ListOffsetsResponse:
    """Return the response about one topic as a broker gives it that no longer leads the partition."""
    (found,) = response.topics
    partitions = tuple(
        dataclasses.replace(each, error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER, offset=-1)
        if each.partition_index == partition
        else each
        for each in found.partitions
    )
    return dataclasses.replace(response, topics=(dataclasses.replace(found, partitions=partitions),))
