"""A disk that a test may fill up."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres import short_directory

MEGABYTE = 1024 * 1024

_allocate = os.posix_fallocate
"""The real function, saved because some tests patch `os.posix_fallocate`."""


class Disk:
    """A small file system of its own. A test can fill it to the last page and empty it again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._filler = directory / "filler"

    def fill(self) -> None:
        with self._filler.open("ab") as file:
            size_bytes = 4 * MEGABYTE
            while size_bytes >= 4096:
                try:
                    _allocate(file.fileno(), os.fstat(file.fileno()).st_size, size_bytes)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size_bytes //= 2

    def empty(self) -> None:
        if self._filler.exists():
            os.truncate(self._filler, 0)


@contextlib.contextmanager
def mounted() -> Iterator[Disk]:
    """Mount a file system of 200 MB for as long as the context lasts. Skip the test if the user may not mount."""
    with short_directory() as parent, contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(mounted_at(parent / "disk", 200))
        except PermissionError as error:
            pytest.skip(str(error))
        yield disk


@contextlib.contextmanager
def mounted_at(directory: Path, megabytes: int) -> Iterator[Disk]:
    """Mount a file system on a new directory. Raise PermissionError if the user may not mount."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0711", "tmpfs", str(directory)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        raise PermissionError("only a user that may mount has a disk to fill")
    try:
        yield Disk(directory)
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
