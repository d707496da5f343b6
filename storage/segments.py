"""Segments: files of a local directory that hold the bytes of chunks of many partitions.

The one idea: a file only grows by appends, each position is used once, and the index in Postgres alone says which bytes
count. So a write that no row refers to is garbage, not damage, and a file may be removed when no row names it. Bytes
that `append` has returned for are on disk: the data by fdatasync, the file's name by a sync of its directory at
creation.

This module does not interpret the bytes. Calls that are not `async` block and are made from threads.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from storage.byte_store import MARKER, Buffer, FoundObject, Range, T
from storage.page_cache import PageCacheWindow
from storage.private_files import FILE_MODE, sync_directory, write_file

SEGMENT_BYTES = 64 * 1024 * 1024
READERS = 4
READ_AHEAD_BYTES = 4 * 1024 * 1024
"""Number of bytes behind a range that the kernel is asked to read ahead, for readers that read in order."""

_MAX_BUFFERS = 1024
"""Maximal number of buffers in one write (Linux' IOV_MAX)."""

_NAME = re.compile(r"^([0-9a-f]{16})\.segment$")


class OpenSegment:
    """A file that accepts appends from one writer at a time."""

    def __init__(self, object_id: int, fd: int, limit_bytes: int, on_close: Callable[[int], None]) -> None:
        self.object_id = object_id
        self._fd = fd
        self._limit_bytes = limit_bytes
        self._on_close = on_close
        self.end = 0
        self.opened_at = time.monotonic()

    def has_room(self, size_bytes: int) -> bool:
        """True if the append fits. An empty file accepts any size."""
        return not self.end or self.end + size_bytes <= self._limit_bytes

    def reserve(self, size_bytes: int) -> int:
        """Return the position of the next append of `size_bytes`."""
        position = self.end
        self.end += size_bytes
        return position

    def append(self, buffers: Sequence[Buffer], position: int) -> None:
        """Write the buffers from `position` on and sync. After an OSError the file must not be appended to again."""
        for first in range(0, len(buffers), _MAX_BUFFERS):
            position = self._write(buffers[first : first + _MAX_BUFFERS], position)
        os.fdatasync(self._fd)

    def _write(self, buffers: Sequence[Buffer], position: int) -> int:
        rest = [memoryview(buffer) for buffer in buffers]
        while rest:
            written = os.pwritev(self._fd, rest, position)
            position += written
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if rest and written:
                rest[0] = rest[0][written:]
        return position

    def close(self) -> None:
        """Close the file and release the space that was allocated in advance."""
        try:
            os.ftruncate(self._fd, self.end)
        finally:
            os.close(self._fd)
        self._on_close(self.end)


class SegmentDirectory:
    """The segment files of one store."""

    listing_interval_s = 0.0

    def __init__(
        self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, page_cache_bytes: int | None = None
    ) -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        self._page_cache = PageCacheWindow(page_cache_bytes)
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="segment-reader")

    @property
    def location(self) -> str:
        return str(self.directory)

    def name(self, object_id: int) -> str:
        return str(self.path(object_id))

    def path(self, object_id: int) -> Path:
        return self.directory / f"{object_id:016x}.segment"

    def create(self, object_id: int) -> OpenSegment:
        """Create a file with its space allocated and its name durable. Raise OSError, and leave no file, if that
        fails."""
        path = self.path(object_id)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            try:
                os.posix_fallocate(fd, 0, self.segment_bytes)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
            sync_directory(self.directory)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return OpenSegment(object_id, fd, self.segment_bytes, partial(self._page_cache.add, path))

    def read(self, object_id: int, ranges: Iterable[tuple[int, int]]) -> list[bytearray]:
        """Read (position, size) ranges in the given order; adjacent ranges are read together. If the file is too
        short, the end of a range's bytes is missing. Raise OSError if the file does not exist."""
        wanted = sorted(enumerate(ranges), key=lambda item: item[1])
        found: dict[int, bytearray] = {}
        fd = os.open(self.path(object_id), os.O_RDONLY | os.O_CLOEXEC)
        try:
            first = end = 0
            while first < len(wanted):
                last = first
                position, size_bytes = wanted[first][1]
                end = position + size_bytes
                while last + 1 < len(wanted) and wanted[last + 1][1][0] == end and last + 1 - first < _MAX_BUFFERS:
                    last += 1
                    end += wanted[last][1][1]
                buffers = [bytearray(size) for _, (_, size) in wanted[first : last + 1]]
                got = _read(fd, buffers, position)
                for (index, (_, size)), buffer in zip(wanted[first : last + 1], buffers, strict=True):
                    if got < size:
                        del buffer[max(got, 0) :]
                    got -= size
                    found[index] = buffer
                first = last + 1
            if wanted:
                os.posix_fadvise(fd, end, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)
        return [found[index] for index in range(len(wanted))]

    def trim(self, object_id: int, size_bytes: int) -> None:
        """Durably give back the room of a file behind its first `size_bytes`. Do nothing if no such file exists. Raise
        OSError."""
        try:
            fd = os.open(self.path(object_id), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if os.fstat(fd).st_size > size_bytes:
                os.ftruncate(fd, size_bytes)
                os.fsync(fd)
        finally:
            os.close(fd)

    def delete(self, object_id: int) -> None:
        """Remove the file if it exists."""
        self.path(object_id).unlink(missing_ok=True)

    def found(self) -> list[FoundObject]:
        """List all segments."""
        found: list[FoundObject] = []
        now = time.time()
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if match := _NAME.match(entry.name):
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        continue
                    found.append(FoundObject(int(match[1], 16), status.st_size, now - status.st_mtime))
        return found

    # --- as a store of bytes --------------------------------------------------------------------------------------

    async def put(self, object_id: int, pieces: Sequence[Buffer]) -> None:
        def write() -> None:
            segment = self.create(object_id)
            try:
                segment.append(pieces, segment.reserve(sum(map(len, pieces))))
            finally:
                segment.close()

        await self._in_thread(write)

    async def load(self, object_id: int, ranges: Sequence[Range], look: Callable[[list[bytearray]], T]) -> T:
        return await self._in_thread(lambda: look(self.read(object_id, ranges)))

    def forget(self, object_id: int | None) -> None:
        """Do nothing, because segment files have no cache here."""

    async def remove(self, object_ids: Sequence[int]) -> None:
        def delete() -> None:
            for object_id in object_ids:
                self.delete(object_id)

        await self._in_thread(delete)

    async def give_back_room(self, object_id: int, size_bytes: int) -> None:
        """Trim a file off the event loop. Raise OSError."""
        await self._in_thread(partial(self.trim, object_id, size_bytes))

    async def listed(self) -> list[FoundObject]:
        return await self._in_thread(self.found)

    async def read_marker(self) -> bytes | None:
        try:
            return (self.directory / MARKER).read_bytes()
        except FileNotFoundError:
            return None

    async def create_marker(self, marker: bytes) -> None:
        """Create the marker file. `store.py` serialises processes that do this concurrently."""
        path = self.directory / MARKER
        if path.exists():
            raise FileExistsError(f"{path} exists already")
        await self.replace_marker(marker)

    async def replace_marker(self, marker: bytes) -> None:
        """Replace the marker file. `store.py` serialises processes that do this concurrently."""
        write_file(self.directory / MARKER, marker)
        sync_directory(self.directory)

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _read(fd: int, buffers: list[bytearray], position: int) -> int:
    """Fill the buffers one after the other and return the number of bytes read."""
    total = 0
    rest = [memoryview(buffer) for buffer in buffers]
    while rest:
        count = os.preadv(fd, rest, position + total)
        if not count:
            break
        total += count
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if rest and count:
            rest[0] = rest[0][count:]
    return total
