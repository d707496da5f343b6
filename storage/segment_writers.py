"""Assign segments to appends: one open file for each append in progress, each registered in Postgres.

The one idea: a file is registered before it is created, and sealed when no writer will append to it any more. An
append's transaction checks that its file is still open, and a lock keeps the file open until the transaction has ended.
So references to a sealed file can only become fewer, and a node that finds none may delete the file. The registration
of the writer's node lies beside the file's, so that other nodes seal what a killed process has left open.

This module decides no offsets. `storage/log.py` decides what is written where.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import structlog

from storage.errors import StorageError, StorageUnavailable
from storage.pool import Database, Pool
from storage.queries import statement
from storage.segments import Buffer, OpenSegment, SegmentDirectory
from storage.types import Registration, unregistered

logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

MAX_AGE_S = 600.0
"""A file is replaced by a new one after this time, full or not, long before other nodes seal it (SEAL_AFTER_MS)."""

MAX_WRITERS = 32

Owner = Callable[[], Registration | None]
"""Returns the registration of this process' node. None: other nodes seal the node's objects only when they are old
enough.
"""


async def register_object(pool: Pool, owner: Owner) -> int:
    """Return the id of a new object, before it exists. Raise StorageError."""
    registration = owner()
    return int(await pool.fetch_value(statement("register_object"), *(registration or (None, None))))


class SegmentWriters:
    """Lends open segments to appends."""

    def __init__(
        self,
        database: Database,
        directory: SegmentDirectory,
        owner: Owner = unregistered,
    ) -> None:
        self._database = database
        self._owner = owner
        self._directory = directory
        self._threads = ThreadPoolExecutor(MAX_WRITERS, thread_name_prefix="segment-writer")
        self._idle: list[OpenSegment] = []
        self._spare: asyncio.Task[OpenSegment] | None = None
        self._sealing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def written(
        self, buffers: Sequence[Buffer], size_bytes: int
    ) -> AsyncGenerator[tuple[OpenSegment, int], None]:
        """Write and sync the bytes off the event loop. Then lend the segment, with their position in it, to the block.

        Raise OSError if the bytes cannot be written, StorageUnavailable if Postgres or the directory cannot provide a
        segment.
        """
        segment = await self._take(size_bytes)
        position = segment.reserve(size_bytes)
        loop = asyncio.get_running_loop()
        written = loop.run_in_executor(self._threads, segment.append, buffers, position)
        try:
            await asyncio.shield(written)
            yield segment, position
        finally:
            # A cancelled caller waits too: a thread uses the segment and the bytes until it has written them.
            if not written.done():
                await asyncio.wait([written])
            if written.exception() is not None:
                self._drop(segment)
            else:
                self._idle.append(segment)

    async def _take(self, size_bytes: int) -> OpenSegment:
        while self._idle:
            segment = self._idle.pop()
            if segment.has_room(size_bytes) and time.monotonic() - segment.opened_at < MAX_AGE_S:
                if self._spare is None and not segment.has_room(size_bytes + self._directory.segment_bytes // 2):
                    self._spare = asyncio.create_task(self._create(), name="spare segment")
                    self._spare.add_done_callback(_look_at)
                return segment
            self._drop(segment)
        spare, self._spare = self._spare, None
        if spare is not None and not (spare.done() and (spare.cancelled() or spare.exception())):
            return await spare
        return await self._create()

    def _drop(self, segment: OpenSegment) -> None:
        """Give a segment up: no append uses it any more."""
        task = asyncio.create_task(self._seal(segment), name="seal segment")
        self._sealing.add(task)
        task.add_done_callback(self._sealing.discard)

    def retire(self, segment: OpenSegment) -> None:
        """Give up a segment that other nodes sealed while it was open here. If another append has taken it in the
        meantime, that append will find out and retire it."""
        if segment in self._idle:
            self._idle.remove(segment)
            self._drop(segment)

    async def close(self) -> None:
        """Seal the open segments. Appends in progress must have ended."""
        spare, self._spare = self._spare, None
        if spare is not None:
            await asyncio.wait([spare])
            if not spare.cancelled() and spare.exception() is None:
                self._idle.append(spare.result())
        while self._idle:
            self._drop(self._idle.pop())
        if self._sealing:
            await asyncio.wait(self._sealing)
        self._threads.shutdown(wait=False)

    async def _create(self) -> OpenSegment:
        object_id = await register_object(self._database.hot, self._owner)
        made = asyncio.get_running_loop().run_in_executor(self._threads, self._directory.create, object_id)
        try:
            return await asyncio.shield(made)
        except OSError as error:
            # No file of this number exists. While a disk is full, producers ask for another one several times a second.
            with suppress(StorageError):
                await self._database.hot.fetch(statement("forget_objects"), [object_id])
            raise StorageUnavailable(f"cannot make a segment in {self._directory.directory}: {error}") from error
        except asyncio.CancelledError:
            # The thread creates the file in any case.
            await asyncio.wait([made])
            if made.exception() is None:
                self._drop(made.result())
            raise

    async def _seal(self, segment: OpenSegment) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, segment.close)
            await self._database.hot.fetch_value(statement("seal_object"), segment.object_id, segment.end)
        except (OSError, StorageError) as error:
            # Other nodes will seal it because of its age.
            logger.warning("a segment could not be sealed", object_id=segment.object_id, error=str(error))


def _look_at(task: asyncio.Task[OpenSegment]) -> None:
    """Retrieve the error, so that asyncio does not report it as lost. The next caller tries again and sees the
    error."""
    if not task.cancelled():
        task.exception()
