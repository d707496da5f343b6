"""AlterClientQuotas: set and remove quotas of users and clients (KIP-546)."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, boolean, float64, int16, int32, message, string, struct


@struct
class EntityData:
    entity_type: str = string()
    entity_name: str | None = string(nullable="0+")


@struct
class OpData:
    key: str = string()
    value: float = float64()
    remove: bool = boolean()


@struct
class EntryData:
    entity: tuple[EntityData, ...] = array(EntityData)
    ops: tuple[OpData, ...] = array(OpData)


@message(ApiKey.ALTER_CLIENT_QUOTAS, versions="0-1", flexible="1+")
class AlterClientQuotasRequest:
    entries: tuple[EntryData, ...] = array(EntryData)
    validate_only: bool = boolean()


@struct
class AlteredEntryData:
    error_code: int = int16()
    error_message: str | None = string(nullable="0+")
    entity: tuple[EntityData, ...] = array(EntityData)


@message(ApiKey.ALTER_CLIENT_QUOTAS, versions="0-1", flexible="1+")
class AlterClientQuotasResponse:
    throttle_time_ms: int = int32()
    entries: tuple[AlteredEntryData, ...] = array(AlteredEntryData)
