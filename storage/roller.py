"""Where bytes go after their commit: out of Postgres into segments or objects, and out of those in which little lives.

The one idea: passes look at what is there and bring it nearer to how it should be; each may end anywhere, and is made
up for by the next. What no row names any more is removed: a slot of inline bytes by TRUNCATE, a segment or object once
nobody can come to name anything in it again, and nobody who found it in the index can still be about to read it.

A lease for jobs lets one node at a time move; two side by side would cost work, not bytes. How bytes are moved is
`mover.py`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

import structlog

from storage.byte_store import ByteStore, FoundObject
from storage.chunks import Chunk, chunk_of
from storage.errors import StorageError, StorageUnavailable
from storage.log import LogStore
from storage.mover import SORTED_BYTES, Mover
from storage.pool import Connection, Database
from storage.queries import statement
from storage.segments import SegmentDirectory
from storage.store import read_identity
from storage.types import CoordinatorLease

logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

ROTATE_BYTES = 64 * 1024 * 1024
ROTATE_AGE_MS = 60_000
OBJECTS_AGE_MS = 300_000
"""How large or old inline bytes become before they are moved, the latter into segments and into objects: every object
costs a request. Without a store they only move for size."""

SEAL_AFTER_MS = 30 * 60_000
"""An object that is open for so long was left by a process that ended; see segment_writers.MAX_AGE_S."""

GRACE_MS = 60_000
"""Longer than any append may last: how long an object that is sealed may still come to be named, and how long one that
is unknown here is kept."""

KEPT_MS = 25_000
"""How long one that is named no more is kept: longer than a read may last that has looked up where its bytes lie (a
statement takes 10 s at most, a file or an object 10)."""

SMALL_BYTES = 8 * 1024 * 1024
SMALL_OBJECTS = 8
"""So many objects of less than that are put together."""

REMOVED_AT_ONCE = 100
REMOVAL_PATIENCE_S = 10.0
"""Postgres ends a transaction that has nothing to do for 15 s."""

CHUNKS_PER_STATEMENT = 250
"""Made into values on the event loop, which this holds for a millisecond."""
_ALIVE_SHARE = 0.5


class Roller:
    """Moves and removes bytes. `roll` and `sweep` are passes; with a `lease`, StorageConflict once it is another's."""

    def __init__(
        self,
        database: Database,
        log_store: LogStore,
        store: ByteStore | None,
        *,
        max_bytes: int = ROTATE_BYTES,
        max_age_ms: int = -1,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_bytes` and `max_age_ms` say how large or old inline bytes become; -1: the age that fits the store."""
        self._max_bytes = max_bytes
        self._max_age_ms = max_age_ms
        self._pool = database.cold
        self._store = store
        self._mover = Mover(database, log_store, store)
        self._monotonic = monotonic
        self._listed_at: float | None = None

    async def close(self) -> None:
        await self._mover.close()

    @property
    def _age_ms(self) -> int:
        if self._store is None:
            return -1
        if self._max_age_ms >= 0:
            return self._max_age_ms
        return ROTATE_AGE_MS if isinstance(self._store, SegmentDirectory) else OBJECTS_AGE_MS

    # --- inline bytes ---------------------------------------------------------------------------------------------

    async def roll(
        self, *, max_bytes: int | None = None, max_age_ms: int | None = None, lease: CoordinatorLease | None = None
    ) -> int:
        """One pass over inline bytes: moves what is old or much, empties slots; how many bytes it moved."""
        size_bytes = self._max_bytes if max_bytes is None else max_bytes
        age_ms = self._age_ms if max_age_ms is None or self._store is None else max_age_ms
        await self._pool.fetch_value(statement("rotate_inline"), size_bytes, age_ms)
        moved_bytes = 0
        problem: StorageUnavailable | None = None
        for row in await self._pool.fetch(statement("inline_slots")):
            slot: int = row["slot"]
            if self._store is None:
                alive_bytes = sum([_size(page) async for page in self._alive_inline(slot)])
                if alive_bytes >= _ALIVE_SHARE * row["size_bytes"]:
                    continue
            try:
                moved_bytes += await self._mover.move(self._alive_inline(slot), inline_slot=slot, lease=lease)
            except StorageUnavailable as error:
                # A directory that is full takes nothing; what is dead in other slots may be what makes room.
                problem = error
            await self._truncate(slot)
        if problem is not None:
            raise problem
        return moved_bytes

    async def _alive_inline(self, slot: int) -> AsyncGenerator[list[Chunk]]:
        """What is alive in a slot, in the order in which it was written, a bounded number of chunks at a time."""
        position = 0
        while True:
            rows = await self._pool.fetch(statement("live_inline_chunks"), slot, position, CHUNKS_PER_STATEMENT)
            if rows:
                yield [chunk_of(row) for row in rows]
            if len(rows) < CHUNKS_PER_STATEMENT:
                return
            position = rows[-1]["position"]

    async def _truncate(self, slot: int) -> None:
        try:
            await self._pool.fetch_value(statement("truncate_inline"), slot)
        except StorageError as error:
            # Whoever reads it, a dump for instance, may take long: the next pass tries again.
            logger.info("inline bytes not removed yet", slot=slot, reason=str(error))

    # --- segments and objects -------------------------------------------------------------------------------------

    async def sweep(self, *, grace_ms: int = GRACE_MS, lease: CoordinatorLease | None = None) -> int:
        """One pass over what is in the store: rewrites that of which little is alive, puts small objects together,
        deletes what no chunk names; how many it deleted."""
        store = self._store
        if store is None:
            return 0
        await self._pool.fetch(statement("seal_old_objects"), SEAL_AFTER_MS)
        sealed = {
            row["object_id"]: row["size_bytes"] for row in await self._pool.fetch(statement("sealed_objects"), grace_ms)
        }
        alive_bytes = dict.fromkeys(sealed, 0)
        async for page in self._in_objects():
            for chunk in page:
                if chunk.object_id in alive_bytes:
                    alive_bytes[chunk.object_id] += chunk.size_bytes
        unnamed = [object_id for object_id, size_bytes in alive_bytes.items() if not size_bytes]
        await self._pool.fetch(statement("mark_unreferenced"), unnamed)
        try:
            found = await self._look(store)
            orphans = await self._orphans(found, grace_ms)
            deleted = await self._delete_dead(store, min(grace_ms, KEPT_MS))
            deleted += await self._delete_orphans(store, orphans)
        except OSError as error:
            logger.warning("the store could not be swept", place=store.location, reason=str(error) or "no answer")
            return 0
        sizes = {each.object_id: each.size_bytes for each in found}
        worn = _thin(alive_bytes, sealed, sizes)
        if not isinstance(store, SegmentDirectory):
            worn |= _small(alive_bytes, worn)
        if worn:
            await self._mover.move(self._in_objects(worn), lease=lease)
        return deleted

    async def _look(self, store: ByteStore) -> list[FoundObject]:
        """What is in the store; nothing where it is not time to look again. Ids that are found there and are unknown
        here are never given out from then on, so that nothing that is unknown can become known."""
        now = self._monotonic()
        if self._listed_at is not None and now - self._listed_at < store.listing_interval_s:
            return []
        found = await store.listed()
        self._listed_at = now
        if found:
            await self._pool.fetch(statement("skip_object_ids"), max(each.object_id for each in found))
        return found

    async def _delete_dead(self, store: ByteStore, kept_ms: int) -> int:
        deleted = 0
        while True:
            rows = await self._pool.fetch(statement("long_unreferenced"), kept_ms, REMOVED_AT_ONCE)
            dead = [row["object_id"] for row in rows]
            if not dead or not await self._delete(store, dead, "dead"):
                return deleted
            deleted += len(dead)

    async def _orphans(self, found: Sequence[FoundObject], grace_ms: int) -> list[int]:
        rows = await self._pool.fetch(statement("known_objects"), [each.object_id for each in found])
        known = {row["object_id"] for row in rows}
        return [each.object_id for each in found if each.object_id not in known and each.age_s * 1000 >= grace_ms]

    async def _delete_orphans(self, store: ByteStore, orphans: Sequence[int]) -> int:
        deleted = 0
        for first in range(0, len(orphans), REMOVED_AT_ONCE):
            some = orphans[first : first + REMOVED_AT_ONCE]
            if not await self._delete(store, some, "unknown"):
                break
            deleted += len(some)
        return deleted

    async def _delete(self, store: ByteStore, object_ids: Sequence[int], kind: str) -> bool:
        """Bytes first, so that none is ever without a row; False while a backup copies them, or where the store is not
        this database's any more."""
        if await read_identity(store) != (await self._pool.fetch_value(statement("log_store"))):
            logger.error("the store holds the records of another database: nothing is removed", place=store.location)
            return False
        problem: OSError | None = None

        async def delete(connection: Connection) -> bool:
            nonlocal problem
            if not await connection.fetchval(statement("try_lock_deletion")):
                return False
            try:
                async with asyncio.timeout(REMOVAL_PATIENCE_S):
                    await store.remove(object_ids)
            except OSError as error:
                # Here it would be taken for Postgres' own.
                problem = error
                return False
            await connection.execute(statement("forget_objects"), object_ids)
            return True

        deleted = await self._pool.transact(delete)
        if problem is not None:
            raise problem
        logger.info("objects deleted" if deleted else "objects kept for a backup", count=len(object_ids), kind=kind)
        return deleted

    async def _in_objects(self, only: frozenset[int] | None = None) -> AsyncIterator[list[Chunk]]:
        """Every chunk that does not lie inline, in the order of the log and in bounded statements; or those in the
        objects given. One that is moved meanwhile may be met where it was; one that stays is met for certain."""
        key, offset = 0, -1
        while True:
            rows = await self._pool.fetch(statement("chunks_in_objects"), key, offset, CHUNKS_PER_STATEMENT)
            yield [
                chunk_of(row)
                for row in rows
                if row["object_id"] is not None and (only is None or row["object_id"] in only)
            ]
            if len(rows) < CHUNKS_PER_STATEMENT:
                return
            key, offset = rows[-1]["partition_key"], rows[-1]["base_offset"]


def _thin(alive_bytes: Mapping[int, int], sealed: Mapping[int, int | None], found: Mapping[int, int]) -> frozenset[int]:
    """Objects less than half of whose bytes are alive."""
    return frozenset(
        object_id
        for object_id, size_bytes in alive_bytes.items()
        if size_bytes and size_bytes < _ALIVE_SHARE * (sealed[object_id] or found.get(object_id, 0))
    )


def _small(alive_bytes: Mapping[int, int], worn: frozenset[int]) -> frozenset[int]:
    """Small objects, if there are enough to make a large one of them, or a larger one."""
    small = frozenset(
        object_id
        for object_id, size_bytes in alive_bytes.items()
        if 0 < size_bytes < SMALL_BYTES and object_id not in worn
    )
    return (
        small
        if len(small) >= SMALL_OBJECTS or sum(alive_bytes[each] for each in small) >= SORTED_BYTES
        else frozenset()
    )


def _size(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.size_bytes for chunk in chunks)
