"""Keep a log's newest files in the operating system's page cache, up to a bound.

The one idea: a log at full speed takes a new page for every page it writes, as long as the system has free ones. The
first touch of a page is expensive in a guest whose host backs memory on demand, and in a container at its limit. If
older files are dropped from the cache, the next file reuses their pages. Pages that readers bring back are left to the
system.

Calls block and are made from threads.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path


class PageCacheWindow:
    """The newest whole files, up to `limit_bytes`; None leaves everything to the operating system."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._files: deque[tuple[Path, int]] = deque()
        self._held_bytes = 0
        self._lock = threading.Lock()

    def add(self, path: Path, size_bytes: int) -> None:
        """Note that the file is written and synced and will not grow."""
        if self._limit_bytes is None:
            return
        for behind in self._behind(path, size_bytes, self._limit_bytes):
            _give_up(behind)

    def _behind(self, path: Path, size_bytes: int, limit_bytes: int) -> list[Path]:
        found: list[Path] = []
        with self._lock:
            self._files.append((path, size_bytes))
            self._held_bytes += size_bytes
            while self._held_bytes > limit_bytes:
                oldest, its_bytes = self._files.popleft()
                self._held_bytes -= its_bytes
                found.append(oldest)
        return found


def _give_up(path: Path) -> None:
    """Ask the system to drop the file's clean pages. This is a hint: readers still find the bytes on disk."""
    # Retention may have removed the file, or this process may have no free file descriptor.
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
