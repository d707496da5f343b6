"""DescribeConfigs: settings of topics and brokers with their sources.

Version 1 brings sources and synonyms (KIP-226), 3 types and documentation (KIP-569).
"""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, int8, int16, int32, message, string, struct


@struct
class DescribeConfigsResource:
    resource_type: int = int8()
    resource_name: str = string()
    configuration_keys: tuple[str, ...] | None = array(string, nullable="0+")


@message(ApiKey.DESCRIBE_CONFIGS, versions="1-4", flexible="4+")
class DescribeConfigsRequest:
    resources: tuple[DescribeConfigsResource, ...] = array(DescribeConfigsResource)
    include_synonyms: bool = boolean()
    include_documentation: bool = boolean(versions="3+")


@struct
class DescribeConfigsSynonym:
    name: str = string()
    value: str | None = string(nullable="0+")
    source: int = int8()


@struct
class DescribeConfigsResourceResult:
    name: str = string()
    value: str | None = string(nullable="0+")
    read_only: bool = boolean()
    config_source: int = int8(default=-1)
    is_sensitive: bool = boolean()
    synonyms: tuple[DescribeConfigsSynonym, ...] = array(DescribeConfigsSynonym)
    config_type: int = int8(versions="3+")
    documentation: str | None = string(versions="3+", nullable="3+")


@struct
class DescribeConfigsResult:
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")
    resource_type: int = int8()
    resource_name: str = string()
    configs: tuple[DescribeConfigsResourceResult, ...] = array(DescribeConfigsResourceResult)


@message(ApiKey.DESCRIBE_CONFIGS, versions="1-4", flexible="4+")
class DescribeConfigsResponse:
    throttle_time_ms: int = int32()
    results: tuple[DescribeConfigsResult, ...] = array(DescribeConfigsResult)
