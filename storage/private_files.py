"""Files that only their owner may read, and writes that follow no symlink.

The one idea: a process that runs as root writes below directories whose owner is another account. So a file is always
written under a new name that must not exist yet, given its owner by descriptor, and renamed into place. Nothing that
the directory's owner plants there is opened, followed or given away.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Generator
from pathlib import Path

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600


class ForeignFileError(OSError):
    """A directory contains an entry that must not be given to another account."""


def sync_directory(directory: Path) -> None:
    """Make created and removed names of the directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(directory: Path) -> bool:
    """Create the directory, readable to this account alone under any umask, and missing parents. Make their names
    durable. Return whether the directory is new. An existing one stays as it is."""
    try:
        _make_parents(directory.parent)
        directory.mkdir(DIRECTORY_MODE)
    except FileExistsError:
        if not directory.is_dir():
            raise
        return False
    directory.chmod(DIRECTORY_MODE)
    sync_directory(directory.parent)
    return True


def _make_parents(directory: Path) -> None:
    if not directory.exists():
        _make_parents(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def restrict_directory(directory: Path, needed: int = 0) -> None:
    """Take read and write permission from group and others, and add the bits of `needed`.

    Another account's directory and one with the sticky bit, such as /tmp, stay as they are.
    """
    found = directory.stat()
    mode = stat.S_IMODE(found.st_mode)
    wanted = mode & ~0o066 | needed
    if found.st_uid == os.geteuid() and not mode & stat.S_ISVTX and mode != wanted:
        directory.chmod(wanted)


def open_lock(path: Path) -> int:
    """Open a lock file, created if needed, that no other account can open and therefore none can lock."""
    lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    found = os.fstat(lock_fd)
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != FILE_MODE:
        os.fchmod(lock_fd, FILE_MODE)
    return lock_fd


@contextlib.contextmanager
def opened_directory(directory: Path) -> Generator[int]:
    """Open the directory as a descriptor; raise OSError if `directory` is a symlink or no directory."""
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield directory_fd
    finally:
        os.close(directory_fd)


def write_file(path: Path, content: bytes, owner: tuple[int, int] | None = None) -> None:
    """Replace the file at `path`; `owner` is its uid and gid, None for this process's. Blocks until it is on disk."""
    with opened_directory(path.parent) as directory_fd:
        fresh = f"{path.name}.new"
        with os.fdopen(_create(fresh, directory_fd), "wb") as file:
            file.write(content)
            file.flush()
            if owner is not None:
                os.fchown(file.fileno(), *owner)
            os.fsync(file.fileno())
        os.rename(fresh, path.name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)


def create_file(path: Path) -> int:
    """Open a descriptor for a new file at `path`. It replaces an existing file."""
    with opened_directory(path.parent) as directory_fd:
        return _create(path.name, directory_fd)


def _create(name: str, directory_fd: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory_fd)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, FILE_MODE, dir_fd=directory_fd)


def read_file(path: Path, limit_bytes: int) -> bytes:
    """Read at most `limit_bytes` of a regular file. Raise OSError if `path` is a symlink or something else."""
    with opened_directory(path.parent) as directory_fd:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file_fd = os.open(path.name, flags, dir_fd=directory_fd)
    with os.fdopen(file_fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(file_fd).st_mode):
            raise ForeignFileError(f"{path} is not a regular file")
        return file.read(limit_bytes)


def give_tree(directory: Path, previous_uids: set[int], owner: tuple[int, int]) -> None:
    """Give the directory and everything below it to `owner`.

    A process of a previous owner may still be at work in the tree. So each directory changes hands before its entries
    do; after that no previous owner can alter any entry. A file with a second name may belong to another account:
    ForeignFileError refuses it, and also any entry of a third account. A later call completes what an earlier one
    began.
    """
    with opened_directory(directory) as directory_fd:
        _give_directory(directory_fd, directory, previous_uids | {owner[0]}, owner)


def _give_directory(directory_fd: int, path: Path, accepted: set[int], owner: tuple[int, int]) -> None:
    if os.fstat(directory_fd).st_uid not in accepted:
        raise ForeignFileError(f"{path} belongs to uid {os.fstat(directory_fd).st_uid}")
    os.fchown(directory_fd, *owner)
    with os.scandir(directory_fd) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        entry_fd = os.open(name, flags, dir_fd=directory_fd)
        try:
            found = os.fstat(entry_fd)
            if stat.S_ISLNK(found.st_mode):
                continue
            if stat.S_ISDIR(found.st_mode):
                readable_fd = os.open(
                    name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd
                )
                try:
                    _give_directory(readable_fd, path / name, accepted, owner)
                finally:
                    os.close(readable_fd)
            elif stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid in accepted:
                # Use the descriptor's path, because a descriptor opened with O_PATH does not support fchown.
                os.chown(f"/proc/self/fd/{entry_fd}", *owner)
            else:
                raise ForeignFileError(
                    f"{path / name} is no file of the cluster's alone (uid {found.st_uid}, {found.st_nlink} links)"
                )
        finally:
            os.close(entry_fd)
