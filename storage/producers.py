"""Producer ids, and how long producers are remembered.

The one idea: ids are allocated in blocks, so InitProducerId seldom needs the database. A block is allocated once in the
life of the database: ids that a process did not use are skipped, never reused. `storage.log` alone writes the state
that recognises duplicates; this module only removes it.
"""

from __future__ import annotations

import asyncio

from storage.pool import Database
from storage.queries import statement

BLOCK_SIZE = 1000
"""Number of ids per block, the same as in upstream's ProducerIdsBlock."""

_LOOKED_AT = 10_000
"""Number of producers that one statement examines."""


class ProducerStore:
    """Allocates producer ids and expires idle producers."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._next_id = 0
        self._block_end = 0
        self._lock = asyncio.Lock()

    async def allocate_producer_id(self) -> int:
        """Return an id that no producer of this cluster has had."""
        async with self._lock:
            if self._next_id == self._block_end:
                first = int(await self._database.hot.fetch_value(statement("take_producer_ids"), BLOCK_SIZE))
                self._next_id, self._block_end = first, first + BLOCK_SIZE
            producer_id = self._next_id
            self._next_id += 1
            return producer_id

    async def expire(self, idle_ms: int, limit: int) -> int:
        """Remove about `limit` producers that were idle for more than `idle_ms` by Postgres' clock and have no open
        transaction. Return their number.

        Upstream: producer.id.expiration.ms. A removed producer may continue with any sequence.
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
