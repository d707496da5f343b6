"""The quotas of a cluster as a value that says which limit applies to a client.

The one idea: the most specific quota applies, and the entity that it names shares it. A quota of a user applies to all
of the user's clients together. A default quota applies to each user or client separately.

Mirrors upstream's ClientQuotaManager (KIP-13, KIP-55, KIP-124, KIP-546, KIP-599, KIP-612).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from ipaddress import ip_address
from typing import NamedTuple

from gateway.net.pieces import in_pieces
from storage.types import DEFAULT_NAME, ClientQuota

DEFAULT = DEFAULT_NAME
"""Stands in the place of a name for every entity without a quota of its own."""


class QuotaKey(StrEnum):
    PRODUCER_BYTE_RATE = "producer_byte_rate"
    CONSUMER_BYTE_RATE = "consumer_byte_rate"
    REQUEST_PERCENTAGE = "request_percentage"
    CONTROLLER_MUTATION_RATE = "controller_mutation_rate"
    CONNECTION_CREATION_RATE = "connection_creation_rate"


class EntityType(StrEnum):
    USER = "user"
    CLIENT_ID = "client-id"
    IP = "ip"


Entity = frozenset[tuple[EntityType, str]]
"""The entity that a quota limits: a user, a client id, a client id of a user, or an address. A name may be DEFAULT."""

KEYS_OF_ADDRESSES = frozenset({QuotaKey.CONNECTION_CREATION_RATE})
KEYS_OF_CLIENTS = frozenset(QuotaKey) - KEYS_OF_ADDRESSES


class Limit(NamedTuple):
    bound: float
    """Bytes, mutations, connections or hundredths of a thread's time, per second."""
    shared_by: tuple[str | None, str | None]
    """User and client id of clients that share one limit. None stands for every name."""


class Quotas:
    """All quotas. Immutable."""

    def __init__(self, values: Mapping[Entity, Mapping[str, float]] = {}) -> None:
        self._values: dict[Entity, dict[str, float]] = {}
        self._addresses: dict[str, float] = {}
        self._limited: set[str] = set()
        for entity, of_entity in values.items():
            for key, bound in of_entity.items():
                self._add(entity, key, bound)

    @classmethod
    async def read(cls, stored: Iterable[ClientQuota]) -> Quotas:
        """Build the value from the quotas of the catalog."""
        quotas = cls()
        async for quota in in_pieces(stored):
            named = (
                (EntityType.USER, quota.user_name),
                (EntityType.CLIENT_ID, quota.client_id),
                (EntityType.IP, quota.address),
            )
            if quota.value is not None:
                entity = frozenset((kind, name) for kind, name in named if name is not None)
                quotas._add(entity, quota.name, quota.value)
        return quotas

    def _add(self, entity: Entity, key: str, bound: float) -> None:
        self._values.setdefault(entity, {})[key] = bound
        self._limited.add(key)
        address = dict(entity).get(EntityType.IP)
        if address is not None and key == QuotaKey.CONNECTION_CREATION_RATE:
            self._addresses[canonical_address(address) or DEFAULT] = bound

    def limits(self, key: QuotaKey) -> bool:
        """True if at least one entity has a quota for the key."""
        return key in self._limited

    def __contains__(self, entity: Entity) -> bool:
        return entity in self._values

    def __len__(self) -> int:
        """Number of entities with a quota."""
        return len(self._values)

    def items(self) -> Iterator[tuple[Entity, Mapping[str, float]]]:
        yield from self._values.items()

    def limit(self, user: str, client_id: str, key: QuotaKey) -> Limit | None:
        """Return the limit for a client of a user, or None."""
        for users in (user, DEFAULT):
            for clients in (client_id, DEFAULT):
                if (bound := self._bound(key, (EntityType.USER, users), (EntityType.CLIENT_ID, clients))) is not None:
                    return Limit(bound, (user, client_id))
            if (bound := self._bound(key, (EntityType.USER, users))) is not None:
                return Limit(bound, (user, None))
        for clients in (client_id, DEFAULT):
            if (bound := self._bound(key, (EntityType.CLIENT_ID, clients))) is not None:
                return Limit(bound, (None, client_id))
        return None

    def connections_from(self, address: str) -> float | None:
        """Return how many connections the address may open per second. Each address has the default for itself."""
        return self._addresses.get(address, self._addresses.get(DEFAULT))

    def _bound(self, key: QuotaKey, *entity: tuple[EntityType, str]) -> float | None:
        return self._values.get(frozenset(entity), {}).get(key)


def canonical_address(name: str) -> str | None:
    """Return an IP address as a socket names its peer, or None if `name` is not an address."""
    try:
        return str(ip_address(name))
    except ValueError:
        return None
