"""DescribeCluster: cluster id, controller and nodes (KIP-700).

Version 1 chooses between brokers and controllers (KIP-919), 2 can include fenced brokers (KIP-1073).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int8, int16, int32, message, string, struct


@message(ApiKey.DESCRIBE_CLUSTER, versions="0-2", flexible="0+")
class DescribeClusterRequest:
    include_cluster_authorized_operations: bool = boolean()
    endpoint_type: int = int8(versions="1+", default=1)
    include_fenced_brokers: bool = boolean(versions="2+")


@struct
class DescribeClusterBroker:
    broker_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(nullable="0+", default=None)
    is_fenced: bool = boolean(versions="2+")


@message(ApiKey.DESCRIBE_CLUSTER, versions="0-2", flexible="0+")
class DescribeClusterResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
    endpoint_type: int = int8(versions="1+", default=1)
    cluster_id: str = string()
    controller_id: int = int32(default=-1)
    brokers: tuple[DescribeClusterBroker, ...] = array(DescribeClusterBroker)
    cluster_authorized_operations: int = int32(default=-0x80000000)
