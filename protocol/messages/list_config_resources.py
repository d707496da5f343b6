"""ListConfigResources: names of the resources that may have configs (KIP-1142).

Version 0 knows client metrics only; 1 takes and returns resource types.
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int8, int16, int32, message, string, struct


@message(ApiKey.LIST_CONFIG_RESOURCES, versions="0-1", flexible="0+")
class ListConfigResourcesRequest:
    resource_types: tuple[int, ...] = array(int8, versions="1+")


@struct
class ConfigResource:
    resource_name: str = string()
    resource_type: int = int8(versions="1+", default=16)


@message(ApiKey.LIST_CONFIG_RESOURCES, versions="0-1", flexible="0+")
class ListConfigResourcesResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    config_resources: tuple[ConfigResource, ...] = array(ConfigResource)
