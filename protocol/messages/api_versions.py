"""ApiVersions: the first request of a connection, answered with the served APIs and versions.

Version 3 names the client's software and brings features as tagged fields; 4 lets a feature's lowest level be 0.
Version 5 names the cluster and the node that the client means to speak to (KIP-1242).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int16, int32, int64, message, string, struct


@message(ApiKey.API_VERSIONS, versions="0-5", flexible="3+")
class ApiVersionsRequest:
    client_software_name: str = string(versions="3+")
    client_software_version: str = string(versions="3+")
    cluster_id: str | None = string(versions="5+", nullable="5+", default=None)
    node_id: int = int32(versions="5+", default=-1)


@struct
class ApiVersion:
    api_key: int = int16()
    min_version: int = int16()
    max_version: int = int16()


@struct
class SupportedFeatureKey:
    name: str = string()
    min_version: int = int16()
    max_version: int = int16()


@struct
class FinalizedFeatureKey:
    name: str = string()
    max_version_level: int = int16()
    min_version_level: int = int16()


@message(ApiKey.API_VERSIONS, versions="0-5", flexible="3+")
class ApiVersionsResponse:
    error_code: int = int16()
    api_keys: tuple[ApiVersion, ...] = array(ApiVersion)
    throttle_time_ms: int = int32(versions="1+")
    supported_features: tuple[SupportedFeatureKey, ...] = array(SupportedFeatureKey, versions="3+", tag=0)
    finalized_features_epoch: int = int64(versions="3+", tag=1, default=-1)
    finalized_features: tuple[FinalizedFeatureKey, ...] = array(FinalizedFeatureKey, versions="3+", tag=2)
    zk_migration_ready: bool = boolean(versions="3+", tag=3)
