"""WriteTxnMarkers: end transactions in the logs of their partitions. Brokers send it to each other. Administrators send
it to end a transaction that hangs (KIP-664).

Version 1 is the oldest left. Version 2 contains the `transaction.version` of each transaction (KIP-1228).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int8, int16, int32, int64, message, string, struct


@struct
class WritableTxnMarkerTopic:
    name: str = string()
    partition_indexes: tuple[int, ...] = array(int32)


@struct
class WritableTxnMarker:
    producer_id: int = int64()
    producer_epoch: int = int16()
    transaction_result: bool = boolean()
    topics: tuple[WritableTxnMarkerTopic, ...] = array(WritableTxnMarkerTopic)
    coordinator_epoch: int = int32()
    transaction_version: int = int8(versions="2+", default=0)


@message(ApiKey.WRITE_TXN_MARKERS, versions="1-2", flexible="1+")
class WriteTxnMarkersRequest:
    markers: tuple[WritableTxnMarker, ...] = array(WritableTxnMarker)


@struct
class WritableTxnMarkerPartitionResult:
    partition_index: int = int32()
    error_code: int = int16()


@struct
class WritableTxnMarkerTopicResult:
    name: str = string()
    partitions: tuple[WritableTxnMarkerPartitionResult, ...] = array(WritableTxnMarkerPartitionResult)


@struct
class WritableTxnMarkerResult:
    producer_id: int = int64()
    topics: tuple[WritableTxnMarkerTopicResult, ...] = array(WritableTxnMarkerTopicResult)


@message(ApiKey.WRITE_TXN_MARKERS, versions="1-2", flexible="1+")
class WriteTxnMarkersResponse:
    markers: tuple[WritableTxnMarkerResult, ...] = array(WritableTxnMarkerResult)
