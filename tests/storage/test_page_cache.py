"""Which files of a log's directory stay in the operating system's page cache, as the kernel reports it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

import pytest

from storage.segments import SegmentDirectory

FILE_BYTES = 256 * 1024
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def cached_bytes(path: Path) -> int:
    """Return how many bytes of a file the page cache holds (mincore(2))."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = ctypes.create_string_buffer(-(-len(mapped) // mmap.PAGESIZE))
        first = ctypes.c_char.from_buffer(mapped)
        failed = LIBC.mincore(ctypes.addressof(first), len(mapped), pages)
        del first
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in pages.raw) * mmap.PAGESIZE


async def fill(directory: SegmentDirectory, files: int) -> list[int]:
    """Write so many files, and return how many bytes of each the cache holds, the oldest first."""
    for object_id in range(files):
        await directory.put(object_id, [bytes([object_id]) * FILE_BYTES])
    return [cached_bytes(directory.path(object_id)) for object_id in range(files)]


@pytest.mark.parametrize(("limit_bytes", "files"), [(3 * FILE_BYTES, 3), (3 * FILE_BYTES - 1, 2), (0, 0), (None, 6)])
async def test_the_newest_files_stay_in_the_page_cache(tmp_path: Path, limit_bytes: int | None, files: int) -> None:
    directory = SegmentDirectory(tmp_path, segment_bytes=FILE_BYTES, page_cache_bytes=limit_bytes)
    try:
        assert await fill(directory, 6) == [0] * (6 - files) + [FILE_BYTES] * files
        # Bytes dropped from the cache are on disk.
        for object_id in range(6):
            (read,) = await directory.load(object_id, [(0, FILE_BYTES)], lambda pieces: pieces)
            assert read == bytes([object_id]) * FILE_BYTES
    finally:
        directory.close()


async def test_a_removed_file_is_dropped_from_the_cache_without_an_error(tmp_path: Path) -> None:
    directory = SegmentDirectory(tmp_path, segment_bytes=FILE_BYTES, page_cache_bytes=FILE_BYTES)
    try:
        await directory.put(0, [b"0" * FILE_BYTES])
        await directory.remove([0])
        await directory.put(1, [b"1" * FILE_BYTES])
        assert cached_bytes(directory.path(1)) == FILE_BYTES
    finally:
        directory.close()


async def test_a_file_that_cannot_be_dropped_from_the_cache_causes_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    directory = SegmentDirectory(tmp_path, segment_bytes=FILE_BYTES, page_cache_bytes=0)
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    try:
        await directory.put(0, [b"0" * FILE_BYTES])
        assert directory.path(0).stat().st_size == FILE_BYTES
    finally:
        directory.close()
