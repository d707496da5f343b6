"""Producer ids and how long producers are remembered.

The one idea: ids come in blocks, so InitProducerId seldom needs the database, and a block is given once in the life of
the database: what a process did not use when it ended is skipped, never reused. The state that recognises duplicates is
written by `storage.log` alone; here it is only forgotten.
"""

from __future__ import annotations

import asyncio

from storage.pool import Database
from storage.queries import statement

BLOCK_SIZE = 1000
"""As in upstream's ProducerIdsBlock."""

_LOOKED_AT = 10_000
"""Producers that one statement looks at."""


class ProducerStore:
    """Allocates producer ids and expires idle producers."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._next_id = 0
        self._block_end = 0
        self._lock = asyncio.Lock()

    async def allocate_producer_id(self) -> int:
        """An id that no producer of this cluster has had."""
        async with self._lock:
            if self._next_id == self._block_end:
                first = int(await self._database.hot.fetch_value(statement("take_producer_ids"), BLOCK_SIZE))
                self._next_id, self._block_end = first, first + BLOCK_SIZE
            producer_id = self._next_id
            self._next_id += 1
            return producer_id

    async def expire(self, idle_ms: int, limit: int) -> int:
        """Forgets producers idle for more than `idle_ms` by Postgres' clock, about `limit` of them at most; how many it
        forgot.

        Upstream: producer.id.expiration.ms. A forgotten producer may go on with any sequence.
        """
        forgotten = 0
        partition_key, producer_id = -1, -1
        while forgotten < limit:
            row = await self._database.cold.fetch_row(
                statement("expire_producers"), idle_ms, min(limit, _LOOKED_AT), partition_key, producer_id
            )
            assert row is not None
            forgotten += row["forgotten"]
            if row["partition_key"] is None:
                break
            partition_key, producer_id = row["partition_key"], row["producer_id"]
        return forgotten
