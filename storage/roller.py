"""Move committed bytes out of Postgres into segments or objects, and out of objects in which little is still
referenced.

The one idea: a pass looks at the present state and improves it. A pass may stop anywhere, and the next one makes up for
it. Bytes that no row names are removed: a slot of inline bytes by TRUNCATE, a segment or object once two things are
impossible. No writer may name anything in it again, and no reader that found it in the index may still be about to
read.

A lease for jobs lets one node at a time move bytes. Two concurrent nodes would cost work, not bytes. `mover.py` does
the copying.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial

import structlog

from storage.byte_store import ByteStore, FoundObject
from storage.chunks import Chunk, chunk_of
from storage.errors import StorageError, StorageUnavailable
from storage.log import LogStore
from storage.mover import SIZES, Mover, Sizes
from storage.pool import Connection, Database
from storage.queries import statement
from storage.segment_writers import Owner
from storage.segments import SegmentDirectory
from storage.store import mark_history, why_nothing_may_go
from storage.types import CoordinatorLease, unregistered

logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

ROTATE_BYTES = 64 * 1024 * 1024
ROTATE_AGE_MS = 60_000
OBJECTS_AGE_MS = 300_000
"""Size or age at which inline bytes are moved. The ages are for segments and for objects: every object costs a
request. Without a store bytes are moved only because of their size."""

SEAL_AFTER_MS = 30 * 60_000
"""An object that is open for this long was left by a process that died; see segment_writers.MAX_AGE_S."""

GRACE_MS = 60_000
"""How long a sealed object is left alone, and an unknown one is kept."""

KEPT_MS = 25_000
"""How long an unreferenced object is kept: longer than a read may last after it has looked up where its bytes lie (a
statement takes 10 s at most, a file or an object 10)."""

SMALL_BYTES = 8 * 1024 * 1024
SMALL_OBJECTS = 8
"""Objects of less than SMALL_BYTES are merged when there are so many of them."""

REMOVED_AT_ONCE = 100
REMOVAL_PATIENCE_S = 10.0
"""Postgres ends an idle transaction after 15 s."""

MARK_PATIENCE_S = 3.0
"""Until the new history is noted in the store, the node serves no client."""

_ALIVE_SHARE = 0.5
_SCANNED_ROWS = 10_000
"""Number of inline rows that one statement looks up before a slot is emptied."""


class Roller:
    """Moves and removes bytes. `roll` and `sweep` are passes. With a `lease` they raise StorageConflict once another
    node holds it."""

    def __init__(
        self,
        database: Database,
        log_store: LogStore,
        store: ByteStore | None,
        owner: Owner = unregistered,
        *,
        max_bytes: int = ROTATE_BYTES,
        max_age_ms: int = -1,
        monotonic: Callable[[], float] = time.monotonic,
        sizes: Sizes = SIZES,
    ) -> None:
        """`owner` returns the registration of this process' node. `max_bytes` and `max_age_ms` bound inline bytes by
        size and age; −1 chooses the age that fits the store."""
        self._max_bytes = max_bytes
        self._max_age_ms = max_age_ms
        self._database = database
        self._pool = database.cold
        self._store = store
        self._sizes = sizes
        self._mover = Mover(database, log_store, store, owner, sizes)
        self._monotonic = monotonic
        self._listed_at: float | None = None
        self._history_marked = 0
        self._history = database.guard.history
        """History of the last pass over the store."""
        self._ends: dict[int, tuple[int, float]] = {}
        """Maps each sealed segment whose writer did not report its size to the end of its last known chunk, and to the
        time when that end was read.
        """

    async def close(self) -> None:
        await self._mover.close()

    @property
    def _age_ms(self) -> int:
        if self._store is None:
            return -1
        if self._max_age_ms >= 0:
            return self._max_age_ms
        return ROTATE_AGE_MS if isinstance(self._store, SegmentDirectory) else OBJECTS_AGE_MS

    async def begin_history(self, history: int) -> None:
        """Let the store tell nodes at a former primary that another history has begun. If the store is away, the next
        pass does it, and records are served in the meantime."""
        if self._store is None:
            return
        try:
            async with asyncio.timeout(MARK_PATIENCE_S):
                await mark_history(self._store, history)
            self._history_marked = history
        except (OSError, StorageError) as error:
            logger.warning(
                "the new history could not be noted in the store: trying again at the next pass",
                place=self._store.location,
                history=history,
                reason=str(error) or "no answer",
            )

    # --- inline bytes ---------------------------------------------------------------------------------------------

    async def roll(
        self, *, max_bytes: int | None = None, max_age_ms: int | None = None, lease: CoordinatorLease | None = None
    ) -> int:
        """Do one pass over inline bytes: move the bytes that are old or large, and then empty the slots. Return the
        number of bytes moved.
        """
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
                # A full directory accepts nothing, but removing dead bytes from other slots may make room.
                problem = error
            await self._truncate(slot)
        if problem is not None:
            raise problem
        return moved_bytes

    async def _alive_inline(self, slot: int) -> AsyncGenerator[list[Chunk]]:
        """Yield the live chunks of a slot in write order, a bounded number at a time."""
        position: int | None = 0
        while position is not None:
            rows = await self._pool.fetch(statement("live_inline_chunks"), slot, position, self._sizes.listed_chunks)
            if rows[0]["position"] is not None:
                yield [chunk_of(row) for row in rows]
            position = rows[0]["scanned_to"]

    async def _truncate(self, slot: int) -> None:
        """Empty the slot if nothing in it is alive. It may have millions of rows, so no statement reads all of them."""

        async def empty(connection: Connection) -> None:
            # Lock before the first look, so that no row comes behind it.
            if not await connection.fetchval(statement("lock_inline"), slot):
                return
            position: int | None = 0
            while position is not None:
                row = await connection.fetchrow(statement("dead_inline_rows"), slot, position, _SCANNED_ROWS)
                assert row is not None
                if row["any_alive"]:
                    return
                position = row["scanned_to"]
            await connection.execute(statement("truncate_inline"), slot)

        try:
            await self._pool.transact(empty)
        except StorageError as error:
            # A reader of the slot, a dump for instance, may take long. The next pass tries again.
            logger.info("inline bytes not removed yet: trying again", slot=slot, reason=str(error))

    # --- segments and objects -------------------------------------------------------------------------------------

    async def sweep(self, *, grace_ms: int = GRACE_MS, lease: CoordinatorLease | None = None) -> int:
        """Do one pass over the store: rewrite objects of which little is alive, merge small ones, trim what killed
        processes left, and delete unreferenced objects. Return the number of deleted objects."""
        store = self._store
        if store is None:
            return 0
        if self._database.guard.history != self._history:
            self._history = self._database.guard.history
            self._ends.clear()  # in this history a segment may have chunks that had moved in the lost one
        if self._history > self._history_marked:
            await self.begin_history(self._history)
        await self._pool.fetch(statement("seal_abandoned_objects"), SEAL_AFTER_MS)
        sealed: dict[int, int | None] = {
            row["object_id"]: row["size_bytes"] for row in await self._pool.fetch(statement("sealed_objects"), grace_ms)
        }
        alive_bytes = dict.fromkeys(sealed, 0)
        ends: dict[int, int] = {}
        counted_at = self._monotonic()
        async for page in self._in_objects():
            for chunk in page:
                if chunk.object_id in alive_bytes:
                    alive_bytes[chunk.object_id] += chunk.size_bytes
                    ends[chunk.object_id] = max(ends.get(chunk.object_id, 0), chunk.position + chunk.size_bytes)
        unnamed = [object_id for object_id, size_bytes in alive_bytes.items() if not size_bytes]
        await self._pool.fetch(statement("mark_unreferenced"), unnamed)
        try:
            found = await self._look(store)
            orphans = await self._orphans(found, grace_ms)
            deleted = await self._delete_dead(store, min(grace_ms, KEPT_MS))
            deleted += await self._delete_orphans(store, orphans)
            if isinstance(store, SegmentDirectory):
                unsized = {object_id: end for object_id, end in ends.items() if sealed[object_id] is None}
                await self._trim(store, unsized, counted_at, min(grace_ms, KEPT_MS))
        except OSError as error:
            logger.warning(
                "the store could not be swept: trying again", place=store.location, reason=str(error) or "no answer"
            )
            return 0
        # Room that a killed process reserved in a segment is no dead byte.
        sizes = ends if isinstance(store, SegmentDirectory) else {each.object_id: each.size_bytes for each in found}
        worn = _thin(alive_bytes, sealed, sizes)
        if not isinstance(store, SegmentDirectory):
            worn |= _small(alive_bytes, worn, self._sizes)
        if worn:
            await self._mover.move(self._in_objects(worn), lease=lease)
        return deleted

    async def _trim(self, store: SegmentDirectory, ends: Mapping[int, int], counted_at: float, kept_ms: int) -> None:
        """Give back the room that killed processes reserved behind the last chunks of their segments. `ends` were
        counted at `counted_at`.

        A reader that found a chunk in the index keeps its bytes for `kept_ms`, even if the chunk has moved since. So a
        segment is trimmed to the end that an earlier pass has counted. No chunk is ever added to a sealed segment.
        """
        self._ends = {object_id: self._ends.get(object_id, (end, counted_at)) for object_id, end in ends.items()}
        for object_id, (end, since) in list(self._ends.items()):
            if (self._monotonic() - since) * 1000 < kept_ms:
                continue
            trim = partial(store.give_back_room, object_id, end)
            if not await self._change(store, trim, statement("store_trimmed_size"), object_id, end):
                return
            logger.info("room of an abandoned segment given back", object_id=object_id, size_bytes=end)

    async def _look(self, store: ByteStore) -> list[FoundObject]:
        """List the objects of the store, or nothing if the next listing is not due or the store belongs to another
        database or a later history. Unknown ids that are found here are never assigned later, so no unknown object can
        become known. If this were a former primary, it would then assign the ids of the present one."""
        now = self._monotonic()
        if self._listed_at is not None and now - self._listed_at < store.listing_interval_s:
            return []
        found = await store.listed()
        self._listed_at = now
        if not await self._owns(store):
            return []
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
        """Delete the bytes before their row, so that no bytes are ever without a row. Return whether that was done."""
        deleted = await self._change(store, lambda: store.remove(object_ids), statement("forget_objects"), object_ids)
        logger.info("objects deleted" if deleted else "objects kept for a backup", count=len(object_ids), kind=kind)
        return deleted

    async def _change(
        self, store: ByteStore, change: Callable[[], Awaitable[None]], query: str, *arguments: object
    ) -> bool:
        """Change the store, then run a statement that says so. Return False, and do neither, while a backup copies the
        store, or if the store belongs to another database by now. Raise OSError.

        Raise StorageUnavailable if Postgres has failed over: the former server does not know what other nodes have
        written since."""
        await self._database.confirm_history()
        if not await self._owns(store):
            return False
        problem: OSError | None = None

        async def run(connection: Connection) -> bool:
            nonlocal problem
            if not await connection.fetchval(statement("try_lock_deletion")):
                return False
            try:
                async with asyncio.timeout(REMOVAL_PATIENCE_S):
                    await change()
            except OSError as error:
                # The caller would take this OSError for one of Postgres.
                problem = error
                return False
            await connection.execute(query, *arguments)
            return True

        done = await self._pool.transact(run)
        if problem is not None:
            raise problem
        return done

    async def _owns(self, store: ByteStore) -> bool:
        """Return whether the store belongs to this database in its present history. Raise OSError."""
        reason = await why_nothing_may_go(store, await self._pool.fetch_row(statement("log_store")))
        if reason is not None:
            logger.error("no object is removed", place=store.location, reason=reason)
        return reason is None

    async def _in_objects(self, only: frozenset[int] | None = None) -> AsyncIterator[list[Chunk]]:
        """Yield every chunk that is not inline, in log order and in bounded statements, or only the chunks in the
        given objects. A chunk that moves during the iteration may appear at its old place; a chunk that stays always
        appears."""
        key, offset = 0, -1
        while True:
            rows = await self._pool.fetch(statement("chunks_in_objects"), key, offset, self._sizes.listed_chunks)
            yield [
                chunk_of(row)
                for row in rows
                if row["object_id"] is not None and (only is None or row["object_id"] in only)
            ]
            if len(rows) < self._sizes.listed_chunks:
                return
            key, offset = rows[-1]["partition_key"], rows[-1]["base_offset"]


def _thin(alive_bytes: Mapping[int, int], sealed: Mapping[int, int | None], found: Mapping[int, int]) -> frozenset[int]:
    """Return the objects of which less than half is alive."""
    return frozenset(
        object_id
        for object_id, size_bytes in alive_bytes.items()
        if size_bytes and size_bytes < _ALIVE_SHARE * (sealed[object_id] or found.get(object_id, 0))
    )


def _small(alive_bytes: Mapping[int, int], worn: frozenset[int], sizes: Sizes) -> frozenset[int]:
    """Return the small objects if there are many of them, or if they fill a large one together."""
    small = frozenset(
        object_id
        for object_id, size_bytes in alive_bytes.items()
        if 0 < size_bytes < SMALL_BYTES and object_id not in worn
    )
    return (
        small
        if len(small) >= SMALL_OBJECTS or sum(alive_bytes[each] for each in small) >= sizes.sorted_bytes
        else frozenset()
    )


def _size(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.size_bytes for chunk in chunks)
