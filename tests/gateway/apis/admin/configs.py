"""Requests that describe and alter configurations."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.messages import alter_configs as legacy
from protocol.messages import incremental_alter_configs as incremental
from protocol.messages.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from tests.gateway.admin import AdminNode


async def describe(node: AdminNode, kind: int, name: str, *keys: str, version: int = 4, **flags):
    request = DescribeConfigsRequest(
        resources=(DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=keys or None),),
        **flags,
    )
    (result,) = (await node.ask(ApiKey.DESCRIBE_CONFIGS, request, version)).results
    assert (result.resource_type, result.resource_name) == (kind, name)
    return result


async def replace(node: AdminNode, kind: int, name: str, configs, *, version: int = 2, validate_only: bool = False):
    entries = tuple(legacy.AlterableConfig(name=key, value=value) for key, value in configs)
    resource = legacy.AlterConfigsResource(resource_type=kind, resource_name=name, configs=entries)
    request = legacy.AlterConfigsRequest(resources=(resource,), validate_only=validate_only)
    (response,) = (await node.ask(ApiKey.ALTER_CONFIGS, request, version)).responses
    assert (response.resource_type, response.resource_name) == (kind, name)
    return response


async def alter(node: AdminNode, kind: int, name: str, *changes, version: int = 1, validate_only: bool = False):
    entries = tuple(
        incremental.AlterableConfig(name=key, config_operation=operation, value=value)
        for operation, key, value in changes
    )
    resource = incremental.AlterConfigsResource(resource_type=kind, resource_name=name, configs=entries)
    request = incremental.IncrementalAlterConfigsRequest(resources=(resource,), validate_only=validate_only)
    (response,) = (await node.ask(ApiKey.INCREMENTAL_ALTER_CONFIGS, request, version)).responses
    assert (response.resource_type, response.resource_name) == (kind, name)
    return response
