"""Who may append to which segment: one open file for each append that is under way, each registered in Postgres.

The one idea: a file is registered before it is made and sealed when nobody will append to it any more; an append's
transaction looks whether its file is still open. So a sealed file's references can only become fewer, and whoever
counts them may delete it.

It decides no offsets; what is written where is `storage/log.py`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import structlog

from storage.errors import StorageError, StorageUnavailable
from storage.pool import Database
from storage.queries import statement
from storage.segments import Buffer, OpenSegment, SegmentDirectory

logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)

MAX_AGE_S = 600.0
"""A file is left for a new one after this time, full or not, long before others seal it (SEAL_AFTER_MS)."""

MAX_WRITERS = 32


class SegmentWriters:
    """Gives out open segments. `take` and `give_back` are called around each append."""

    def __init__(
        self, database: Database, directory: SegmentDirectory, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._database = database
        self._directory = directory
        self._monotonic = monotonic
        self._threads = ThreadPoolExecutor(MAX_WRITERS, thread_name_prefix="segment-writer")
        self._idle: list[OpenSegment] = []
        self._spare: asyncio.Task[OpenSegment] | None = None
        self._sealing: set[asyncio.Task[None]] = set()

    async def take(self, size_bytes: int) -> OpenSegment:
        """A segment with room for so many bytes, the caller's alone until it is given back or dropped.

        StorageUnavailable where neither Postgres nor the directory gives one.
        """
        while self._idle:
            segment = self._idle.pop()
            if segment.has_room(size_bytes) and self._monotonic() - segment.opened_at < MAX_AGE_S:
                if self._spare is None and not segment.has_room(size_bytes + self._directory.segment_bytes // 2):
                    self._spare = asyncio.create_task(self._create(), name="spare segment")
                    self._spare.add_done_callback(_look_at)
                return segment
            self.drop(segment)
        spare, self._spare = self._spare, None
        if spare is not None and not (spare.done() and (spare.cancelled() or spare.exception())):
            return await spare
        return await self._create()

    def write(self, segment: OpenSegment, buffers: Sequence[Buffer], position: int) -> asyncio.Future[None]:
        """Begins to write, off the event loop; done once the bytes are on disk."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, segment.append, buffers, position)

    def give_back(self, segment: OpenSegment) -> None:
        """The last append into it has ended well."""
        self._idle.append(segment)

    def drop(self, segment: OpenSegment) -> None:
        """Nobody appends to it any more."""
        task = asyncio.create_task(self._seal(segment), name="seal segment")
        self._sealing.add(task)
        task.add_done_callback(self._sealing.discard)

    def retire(self, segment: OpenSegment) -> None:
        """It has been sealed by others while it was open here."""
        self._idle.remove(segment)
        self.drop(segment)

    async def close(self) -> None:
        """Seals what is open; appends under way must have ended."""
        spare, self._spare = self._spare, None
        if spare is not None:
            await asyncio.wait([spare])
            if not spare.cancelled() and spare.exception() is None:
                self._idle.append(spare.result())
        while self._idle:
            self.drop(self._idle.pop())
        if self._sealing:
            await asyncio.wait(self._sealing)
        self._threads.shutdown(wait=False)

    async def _create(self) -> OpenSegment:
        object_id = int(await self._database.hot.fetch_value(statement("register_object")))
        made = asyncio.get_running_loop().run_in_executor(self._threads, self._directory.create, object_id)
        try:
            return await asyncio.shield(made)
        except OSError as error:
            # There is none of this number. While a disk is full, producers ask for another several times a second.
            with suppress(StorageError):
                await self._database.hot.fetch(statement("forget_objects"), [object_id])
            raise StorageUnavailable(f"cannot make a segment in {self._directory.directory}: {error}") from error
        except asyncio.CancelledError:
            # The thread makes it all the same.
            await asyncio.wait([made])
            if made.exception() is None:
                self.drop(made.result())
            raise

    async def _seal(self, segment: OpenSegment) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, segment.close)
            await self._database.hot.fetch_value(statement("seal_object"), segment.object_id, segment.end)
        except (OSError, StorageError) as error:
            # It is sealed by its age instead.
            logger.warning("a segment could not be sealed", object_id=segment.object_id, error=str(error))


def _look_at(task: asyncio.Task[OpenSegment]) -> None:
    """Whoever needs the segment tries again and sees the error; asyncio would report it as lost."""
    if not task.cancelled():
        task.exception()
