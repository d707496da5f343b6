"""DescribeClientQuotas and AlterClientQuotas: quotas of users, clients (KIP-546) and addresses (KIP-612).

The one idea: a quota is a change of the catalog, as a topic is; each node enforces it by itself, as Kafka's brokers do.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Protocol

import structlog

from gateway.apis.services import ChangesCatalog, HasCatalog
from gateway.config.java_order import bucket, in_java_order, java_hash
from gateway.net.context import RequestContext
from gateway.net.ids import MAX_ID_BYTES
from gateway.net.pieces import in_pieces, tally
from gateway.net.refusals import DerivedRefusal
from gateway.quotas.limits import (
    DEFAULT,
    KEYS_OF_ADDRESSES,
    KEYS_OF_CLIENTS,
    Entity,
    EntityType,
    QuotaKey,
    canonical_address,
)
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.alter_client_quotas import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    AlteredEntryData,
    EntryData,
)
from protocol.messages.alter_client_quotas import EntityData as AlteredEntity
from protocol.messages.describe_client_quotas import (
    ComponentData,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
    EntityData,
    ValueData,
)
from protocol.messages.describe_client_quotas import EntryData as DescribedEntry
from storage.errors import StorageError
from storage.text import stored
from storage.types import ClientQuota

logger = structlog.get_logger(__name__)

WHOLE_NUMBERS = {
    QuotaKey.PRODUCER_BYTE_RATE: (2.0**63, "a LONG"),
    QuotaKey.CONSUMER_BYTE_RATE: (2.0**63, "a LONG"),
    QuotaKey.CONNECTION_CREATION_RATE: (2.0**31 - 1, "an INT"),
}
"""For each type of whole numbers, its greatest value and upstream's name of the type."""
MAX_ENTITIES = 10_000
"""Maximal number of entities with quotas. Every node reads all quotas after each change."""
HASHED_CHARS = 1024
"""Characters of a name that decide the order in which entities are listed: hashing each one takes time."""
CLOSE_TO_WHOLE = 1e-6
"""Upstream's tolerance for whole numbers, because numbers arrive as doubles."""


class Match(IntEnum):
    EXACT = 0
    DEFAULT = 1
    ANY = 2


class _Named(Protocol):
    @property
    def entity_type(self) -> str: ...
    @property
    def entity_name(self) -> str | None: ...


# --- AlterClientQuotas --------------------------------------------------------------------------------------------


async def alter_client_quotas(
    request: AlterClientQuotasRequest, context: RequestContext[ChangesCatalog]
) -> AlterClientQuotasResponse:
    """Change each entry by itself: all its quotas are set or removed, or none. They apply on this node once this is
    answered."""
    services = context.services
    results: list[AlteredEntryData] = []
    await services.catalog.refresh_if_changed()
    changed, added = False, 0
    named = await tally(_entity(entry) for entry in request.entries)
    async for entry in in_pieces(request.entries):
        code, message = ErrorCode.NONE, None
        try:
            if named[_entity(entry)] > 1:
                raise KafkaError(ErrorCode.INVALID_REQUEST, "Each entity must appear at most once.")
            quotas = _asked(entry)
            if any(quota.value is not None for quota in quotas):
                names = _names(entry.entity)
                if any(len(stored(name).encode()) > MAX_ID_BYTES for name in names.values()):
                    raise KafkaError(ErrorCode.INVALID_REQUEST, f"A name has at most {MAX_ID_BYTES} bytes.")
                added += frozenset(names.items()) not in services.catalog.quotas
                if len(services.catalog.quotas) + added > MAX_ENTITIES:
                    raise KafkaError(
                        ErrorCode.POLICY_VIOLATION,
                        f"At most {MAX_ENTITIES} entities may have quotas. Delete some first.",
                    )
            if quotas and not request.validate_only:
                await services.topics.set_client_quotas(quotas)
                changed = True
                logger.info(
                    "quotas changed", entity=_told(entry.entity), quotas={each.name: each.value for each in quotas}
                )
        except KafkaError as refused:
            code, message = refused.code, refused.message
        except StorageError as error:
            code = context.storage_failed(context.api_key, error)
        results.append(AlteredEntryData(error_code=code, error_message=message, entity=entry.entity))
    if changed:
        await services.catalog.refresh_if_changed()
    return AlterClientQuotasResponse(entries=tuple(results))


def _entity(entry: EntryData) -> Hashable:
    return frozenset((part.entity_type, part.entity_name) for part in entry.entity)


def _asked(entry: EntryData) -> list[ClientQuota]:
    names = _names(entry.entity)
    keys = KEYS_OF_CLIENTS
    if (address := names.get(EntityType.IP)) is not None:
        if len(names) > 1:
            raise KafkaError(
                ErrorCode.INVALID_REQUEST, "Invalid quota entity combination, an ip stands for itself alone."
            )
        if address != DEFAULT and canonical_address(address) is None:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"{address} is not a valid IP or resolvable host.")
        keys = KEYS_OF_ADDRESSES
    quotas: dict[str, ClientQuota] = {}
    for op in entry.ops:
        if op.key in quotas:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"Duplicate quota key {op.key}")
        if op.key not in keys:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"Invalid configuration key {op.key}")
        value = None if op.remove else _value(QuotaKey(op.key), op.value)
        quotas[op.key] = ClientQuota(
            names.get(EntityType.USER), names.get(EntityType.CLIENT_ID), names.get(EntityType.IP), op.key, value
        )
    return list(quotas.values())


def _names(entity: Sequence[_Named]) -> Mapping[EntityType, str]:
    if not entity:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Invalid empty client quota entity")
    names: dict[EntityType, str] = {}
    for part in entity:
        kind = _kind(part.entity_type, f"Unhandled client quota entity type: {part.entity_type}")
        if kind in names:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"Duplicate client quota entity entry type {kind}")
        if part.entity_name == "":
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"Empty {kind} not supported")
        names[kind] = DEFAULT if part.entity_name is None else part.entity_name
    return names


def _kind(name: str, refusal: str) -> EntityType:
    if name not in frozenset(EntityType):
        raise KafkaError(ErrorCode.INVALID_REQUEST, refusal)
    return EntityType(name)


def _value(key: QuotaKey, value: float) -> float:
    if math.isnan(value):
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Configuration {key} is no number")
    if value <= 0:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Quota {key} must be greater than 0")
    if key in WHOLE_NUMBERS:
        greatest, kind = WHOLE_NUMBERS[key]
        if value > greatest:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"Proposed value for {key} is too large for {kind}.")
        if value % 1.0 > CLOSE_TO_WHOLE:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"{key} cannot be a fractional value.")
    return value


# --- DescribeClientQuotas -----------------------------------------------------------------------------------------


async def describe_client_quotas(
    request: DescribeClientQuotasRequest, context: RequestContext[HasCatalog]
) -> DescribeClientQuotasResponse:
    """Describe the entities that every component matches. With `strict`, only entities without further parts. Mirrors
    ClientQuotasImage.describe."""
    wanted = _wanted(request.components)
    quotas = context.services.catalog.quotas
    found = [
        (_place(entity, len(quotas)), entity, values)
        async for entity, values in in_pieces(quotas.items())
        if _matches(dict(entity), wanted, strict=request.strict)
    ]
    found.sort(key=lambda one: one[0])
    entries = [
        DescribedEntry(
            entity=tuple(EntityData(entity_type=kind, entity_name=name or None) for kind, name in sorted(entity)),
            values=tuple(ValueData(key=key, value=values[key]) for key in _in_order(values)),
        )
        async for _, entity, values in in_pieces(found)
    ]
    return DescribeClientQuotasResponse(error_message=None, entries=tuple(entries))


def _wanted(components: Sequence[ComponentData]) -> Mapping[EntityType, ComponentData]:
    """Return the components by the type that each selects. Raise KafkaError for the first fault."""
    wanted: dict[EntityType, ComponentData] = {}
    for component in components:
        if not component.entity_type:
            raise KafkaError(ErrorCode.INVALID_REQUEST, "Invalid empty entity type.")
        if component.entity_type not in frozenset(EntityType):
            raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, f"Unsupported entity type {component.entity_type}")
        kind = EntityType(component.entity_type)
        if kind in wanted:
            raise KafkaError(
                ErrorCode.INVALID_REQUEST, f"Entity type {kind} cannot appear more than once in the filter."
            )
        if component.match_type not in frozenset(Match):
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unknown match type {component.match_type}")
        is_exact = component.match_type == Match.EXACT
        if is_exact and component.match is None:
            raise KafkaError(ErrorCode.INVALID_REQUEST, "Request specified EXACT, but gave no match")
        if not is_exact and component.match is not None:
            name = Match(component.match_type).name
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"Request specified {name}, but also a match")
        wanted[kind] = component
    if EntityType.IP in wanted and len(wanted) > 1:
        raise KafkaError(
            ErrorCode.INVALID_REQUEST, "Invalid entity filter component combination, an ip stands for itself alone."
        )
    return wanted


refuse_describe_client_quotas = DerivedRefusal(ApiKey.DESCRIBE_CLIENT_QUOTAS, values={"entries": None})


def _in_order(values: Iterable[str]) -> list[str]:
    """Return keys in Kafka's order, which is at first that of a hash map with sixteen buckets."""
    return in_java_order(in_java_order(values, count=12))


def _place(entity: Entity, count: int) -> int:
    """Return the bucket of an entity in Kafka's hash map of `count` entities."""
    code = 31 + sum(java_hash(kind) ^ java_hash(name[:HASHED_CHARS]) for kind, name in entity)
    return bucket(code & 0xFFFFFFFF, count)


def _matches(names: Mapping[EntityType, str], wanted: Mapping[EntityType, ComponentData], *, strict: bool) -> bool:
    if strict and names.keys() != wanted.keys():
        return False
    for kind, component in wanted.items():
        name = names.get(kind)
        if name is None:
            return False
        if component.match_type == Match.EXACT and (name == DEFAULT or name != component.match):
            return False
        if component.match_type == Match.DEFAULT and name != DEFAULT:
            return False
    return True


def _told(entity: Sequence[AlteredEntity]) -> dict[str, str | None]:
    return {part.entity_type: part.entity_name for part in entity}
