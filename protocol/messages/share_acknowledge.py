"""ShareAcknowledge: accept, release, reject or renew records that a member of a share group has acquired (KIP-932).

Version 0 was early access and is gone. Version 2 brings renewals (KIP-1222).
"""

from __future__ import annotations

from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.messages.share_fetch import AcknowledgementBatch, LeaderIdAndEpoch, NodeEndpoint
from protocol.schema import array, boolean, int16, int32, message, nested, string, struct, uuid


@struct
class AcknowledgePartition:
    partition_index: int = int32()
    acknowledgement_batches: tuple[AcknowledgementBatch, ...] = array(AcknowledgementBatch)


@struct
class AcknowledgeTopic:
    topic_id: UUID = uuid()
    partitions: tuple[AcknowledgePartition, ...] = array(AcknowledgePartition)


@message(ApiKey.SHARE_ACKNOWLEDGE, versions="1-2", flexible="0+")
class ShareAcknowledgeRequest:
    group_id: str | None = string(nullable="0+", default=None)
    member_id: str | None = string(nullable="0+")
    share_session_epoch: int = int32()
    is_renew_ack: bool = boolean(versions="2+", default=False)
    topics: tuple[AcknowledgeTopic, ...] = array(AcknowledgeTopic)


@struct
class PartitionData:
    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    current_leader: LeaderIdAndEpoch = nested(LeaderIdAndEpoch)


@struct
class ShareAcknowledgeTopicResponse:
    topic_id: UUID = uuid()
    partitions: tuple[PartitionData, ...] = array(PartitionData)


@message(ApiKey.SHARE_ACKNOWLEDGE, versions="1-2", flexible="0+")
class ShareAcknowledgeResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    acquisition_lock_timeout_ms: int = int32(versions="2+")
    responses: tuple[ShareAcknowledgeTopicResponse, ...] = array(ShareAcknowledgeTopicResponse)
    node_endpoints: tuple[NodeEndpoint, ...] = array(NodeEndpoint)
