"""DescribeClientQuotas: list the quotas of users and clients (KIP-546)."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, float64, int8, int16, int32, message, string, struct


@struct
class ComponentData:
    entity_type: str = string()
    match_type: int = int8()
    match: str | None = string(nullable="0+")


@message(ApiKey.DESCRIBE_CLIENT_QUOTAS, versions="0-1", flexible="1+")
class DescribeClientQuotasRequest:
    components: tuple[ComponentData, ...] = array(ComponentData)
    strict: bool = boolean()


@struct
class EntityData:
    entity_type: str = string()
    entity_name: str | None = string(nullable="0+")


@struct
class ValueData:
    key: str = string()
    value: float = float64()


@struct
class EntryData:
    entity: tuple[EntityData, ...] = array(EntityData)
    values: tuple[ValueData, ...] = array(ValueData)


@message(ApiKey.DESCRIBE_CLIENT_QUOTAS, versions="0-1", flexible="1+")
class DescribeClientQuotasResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")
    entries: tuple[EntryData, ...] | None = array(EntryData, nullable="0+")
