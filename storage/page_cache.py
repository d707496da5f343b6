"""Which files of a log stay in the operating system's page cache: the newest, up to a bound.

The one idea: a log that is written at full speed takes a new page for each of its own, for as long as the system has
free ones, and the first touch of a page is dear where the memory is a guest's whose host backs it only then, or a
container's that is full. Files behind the bound are given up, so the pages of the next ones are those of the last. What
readers bring back is the system's to keep.

Calls block, and are made from threads.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path


class PageCacheWindow:
    """The newest whole files, up to `limit_bytes` of them; None leaves all of it to the operating system."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._files: deque[tuple[Path, int]] = deque()
        self._held_bytes = 0
        self._lock = threading.Lock()

    def add(self, path: Path, size_bytes: int) -> None:
        """The file is written and synced, and nobody appends to it any more."""
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
    """The system gives back the file's pages that are on disk. A hint: who reads them finds them there."""
    # Retention may have been faster, or the process have all the files open that it may.
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
