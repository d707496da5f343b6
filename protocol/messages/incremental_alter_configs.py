"""IncrementalAlterConfigs: set, delete, append to or subtract from single settings (KIP-339)."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int8, int16, int32, message, string, struct


@struct
class AlterableConfig:
    name: str = string()
    config_operation: int = int8()
    value: str | None = string(nullable="0+")


@struct
class AlterConfigsResource:
    resource_type: int = int8()
    resource_name: str = string()
    configs: tuple[AlterableConfig, ...] = array(AlterableConfig)


@message(ApiKey.INCREMENTAL_ALTER_CONFIGS, versions="0-1", flexible="1+")
class IncrementalAlterConfigsRequest:
    resources: tuple[AlterConfigsResource, ...] = array(AlterConfigsResource)
    validate_only: bool = boolean()


@struct
class AlterConfigsResourceResponse:
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")
    resource_type: int = int8()
    resource_name: str = string()


@message(ApiKey.INCREMENTAL_ALTER_CONFIGS, versions="0-1", flexible="1+")
class IncrementalAlterConfigsResponse:
    throttle_time_ms: int = int32()
    responses: tuple[AlterConfigsResourceResponse, ...] = array(AlterConfigsResourceResponse)
