"""`__consumer_offsets`, made when a group's coordinator is looked for, as upstream does.

The one idea: all who look for one while it is missing wait for one change of the catalog.
"""

from __future__ import annotations

import asyncio

import structlog

from gateway.apis.topics import create_internal_topics
from gateway.log.topic_names import CONSUMER_OFFSETS
from gateway.net.context import Services
from storage.errors import StorageError

logger = structlog.get_logger(__name__)


class InternalTopics:
    """The node's."""

    def __init__(self) -> None:
        self._making: asyncio.Task[None] | None = None

    async def show_consumer_offsets(self, services: Services) -> None:
        """Makes it if there is none, or somebody has deleted it. Without Postgres there is none yet."""
        if services.catalog.get(CONSUMER_OFFSETS) is not None:
            return
        if self._making is None:
            self._making = asyncio.create_task(_make(services))
            self._making.add_done_callback(self._made)
        await asyncio.shield(self._making)

    def _made(self, making: asyncio.Task[None]) -> None:
        self._making = None
        if not making.cancelled():
            # Whoever waited may be gone; asking keeps the loop from reporting the error as lost.
            making.exception()


async def _make(services: Services) -> None:
    catalog = services.catalog
    try:
        await create_internal_topics(services.topics, catalog.broker.offsets_topic_num_partitions)
        await catalog.refresh_if_changed()
    except StorageError as error:
        logger.warning("not created", topic=CONSUMER_OFFSETS, reason=str(error))
