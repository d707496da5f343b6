"""`__consumer_offsets` and `__transaction_state`, created by the first look-up of a coordinator, as upstream does.

The one idea: all callers that need a missing topic wait for one change of the catalog, and no group has a coordinator
before its topic exists. Every client looks up a coordinator first, so only a client that skips this is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol

import structlog

from gateway.apis.admin.new_topics import plan_internal
from gateway.apis.services import ChangesCatalog, HasGroups
from gateway.cluster.leases import partition_of
from gateway.log.catalog import Catalog
from gateway.log.topic_names import CONSUMER_OFFSETS, TRANSACTION_STATE
from gateway.net.context import RequestContext
from protocol.api_keys import ApiKey
from storage.errors import StorageError
from storage.types import Partition

logger = structlog.get_logger(__name__)

COORDINATED = frozenset(
    {
        *(ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP, ApiKey.HEARTBEAT, ApiKey.LEAVE_GROUP),
        *(ApiKey.OFFSET_COMMIT, ApiKey.OFFSET_FETCH, ApiKey.OFFSET_DELETE, ApiKey.TXN_OFFSET_COMMIT),
        *(ApiKey.DESCRIBE_GROUPS, ApiKey.DELETE_GROUPS, ApiKey.LIST_GROUPS),
        *(ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.CONSUMER_GROUP_DESCRIBE),
        *(ApiKey.STREAMS_GROUP_HEARTBEAT, ApiKey.STREAMS_GROUP_DESCRIBE),
        *(ApiKey.SHARE_GROUP_HEARTBEAT, ApiKey.SHARE_GROUP_DESCRIBE, ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS),
        *(ApiKey.ALTER_SHARE_GROUP_OFFSETS, ApiKey.DELETE_SHARE_GROUP_OFFSETS),
    }
)
"""Requests that the coordinator of a group must answer."""


class InternalTopicsServices(ChangesCatalog, HasGroups, Protocol): ...


class InternalTopics:
    """The node's knowledge of its internal topics."""

    def __init__(self) -> None:
        self._making: dict[str, asyncio.Task[None]] = {}

    async def show(self, name: str, services: InternalTopicsServices) -> None:
        """Create CONSUMER_OFFSETS or TRANSACTION_STATE if it is missing or was deleted. Without Postgres it stays
        missing."""
        if services.catalog.get(name) is None:
            making = self._making.get(name)
            if making is None:
                making = self._making[name] = asyncio.create_task(_make(name, services))
                making.add_done_callback(lambda made: self._made(name, made))
            await asyncio.shield(making)
        _begin_if_made(services)

    def _made(self, name: str, making: asyncio.Task[None]) -> None:
        del self._making[name]
        if not making.cancelled():
            # Retrieve the error, so that asyncio does not report it as lost if no caller waits any more.
            making.exception()


class HasInternalTopics(Protocol):
    @property
    def internal_topics(self) -> InternalTopics: ...


def offsets_partitions(catalog: Catalog) -> int:
    """Return the number of partitions that CONSUMER_OFFSETS has, or will have."""
    topic = catalog.get(CONSUMER_OFFSETS)
    return catalog.broker.offsets_topic_num_partitions if topic is None else len(topic.partitions)


def state_partition(catalog: Catalog, transactional_id: str) -> Partition | None:
    """Return the partition of TRANSACTION_STATE to which a transactional id belongs."""
    topic = catalog.get(TRANSACTION_STATE)
    return None if topic is None else topic.partitions[partition_of(transactional_id, len(topic.partitions))]


def prepare(context: RequestContext[InternalTopicsServices]) -> Awaitable[None] | None:
    """Stage of dispatch: before the node refuses groups because `__consumer_offsets` is missing, look whether another
    node has created it."""
    if context.services.groups.begun or context.api_key not in COORDINATED:
        return None
    return _look(context.services)


async def _look(services: InternalTopicsServices) -> None:
    """Look the topic up in Postgres. Raise StorageError."""
    await services.catalog.refresh_if_changed()
    _begin_if_made(services)


def _begin_if_made(services: InternalTopicsServices) -> None:
    """Let groups begin once the topic exists. They begin once and for good: deleting the topic ends no group."""
    if not services.groups.begun and services.catalog.get(CONSUMER_OFFSETS) is not None:
        services.groups.begin()


async def _make(name: str, services: ChangesCatalog) -> None:
    catalog = services.catalog
    try:
        await services.topics.create([plan_internal(name, catalog.broker)])
        await catalog.refresh_if_changed()
    except StorageError as error:
        logger.warning("not created", topic=name, reason=str(error))
