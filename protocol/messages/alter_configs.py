"""AlterConfigs: replace all settings of resources. A setting that the request does not name returns to its default."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int8, int16, int32, message, string, struct


@struct
class AlterableConfig:
    name: str = string()
    value: str | None = string(nullable="0+")


@struct
class AlterConfigsResource:
    resource_type: int = int8()
    resource_name: str = string()
    configs: tuple[AlterableConfig, ...] = array(AlterableConfig)


@message(ApiKey.ALTER_CONFIGS, versions="0-2", flexible="2+")
class AlterConfigsRequest:
    resources: tuple[AlterConfigsResource, ...] = array(AlterConfigsResource)
    validate_only: bool = boolean()


@struct
class AlterConfigsResourceResponse:
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")
    resource_type: int = int8()
    resource_name: str = string()


@message(ApiKey.ALTER_CONFIGS, versions="0-2", flexible="2+")
class AlterConfigsResponse:
    throttle_time_ms: int = int32()
    responses: tuple[AlterConfigsResourceResponse, ...] = array(AlterConfigsResourceResponse)
