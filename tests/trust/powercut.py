"""Simulate a power cut, or a slow disk. After a power cut, all writes and file names that no sync has made durable are
lost.

The one idea: `powercut.c`, preloaded into Postgres and the gateways, records how to undo each change of a file. While
the power is off, all processes are dead, and this module undoes the recorded changes. The library does not sync, so
nothing depends on the kernel.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from storage.postgres_programs import find_programs

T = TypeVar("T")

SOURCE = Path(__file__).with_name("powercut.c")
BUILD_S = 60
_ENTRY = struct.Struct("=qqq")
"""Format of a recorded change: the old size of the file, then position and length of the old bytes that follow."""


class Syncing(StrEnum):
    """Processes whose syncs can be made slow."""

    POSTGRES = "Postgres"
    NODES = "segments"


@dataclass(frozen=True, slots=True)
class Lost:
    """Numbers of changes that a power cut has undone."""

    writes: int
    files: int
    names: int

    def __str__(self) -> str:
        return f"{self.writes} writes to {self.files} files and {self.names} changes of names"


@dataclass(frozen=True, slots=True)
class _Write:
    old_size: int
    position: int
    old_bytes: bytes


@dataclass(frozen=True, slots=True)
class _Name:
    moment: int
    kind: str
    """C created, U unlinked, R renamed."""
    inode: int
    path: Path
    other: Path
    """The former name of a renamed file, or the second link that kept an unlinked file."""


def compiler() -> str | None:
    """Return the C compiler for the library, None if this machine has none."""
    return shutil.which("cc")


class Disk:
    """A directory whose files lose unsynced writes at a power cut."""

    def __init__(self, directory: Path) -> None:
        """Compile the library in `directory`. The watched files must be in `watched`."""
        self.watched = directory / "disk"
        self._kept = directory / "kept"
        self._library = directory / "powercut.so"
        self._switch = directory / "power"
        self._delays = {each: directory / f"delay-{each}" for each in Syncing}
        self.watched.mkdir(mode=0o711)
        self._kept.mkdir()
        self._kept.chmod(0o777)  # Postgres runs as another user
        self._switch.touch(0o644)
        for path in self._delays.values():
            path.touch(0o644)
        subprocess.run(
            [compiler() or "cc", "-shared", "-fPIC", "-O2", "-o", str(self._library), str(SOURCE), "-ldl"],
            check=True,
            timeout=BUILD_S,
        )
        self._library.chmod(0o755)

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the variables for every process that writes to `watched`."""
        return {
            "LD_PRELOAD": str(self._library),
            "POWERCUT_WATCH": str(self.watched),
            "POWERCUT_KEEP": str(self._kept),
            "POWERCUT_SLOW": str(self._delays[Syncing.NODES]),
        }

    def slow_down(self, which: Syncing, sync_s: float) -> None:
        """Make each sync of these processes take this long from now on."""
        self._delays[which].write_text(f"{sync_s * 1000:.0f}\n")

    def speed_up(self) -> None:
        """Make syncs as fast as the disk again."""
        for which in Syncing:
            self.slow_down(which, 0)

    def postgres_programs(self, directory: Path) -> Path:
        """Write programs into `directory` that run Postgres with the preloaded library. They wait while the power is
        off.
        """
        found = find_programs().directory
        directory.mkdir(mode=0o755)
        environment = {**self.environment, "POWERCUT_SLOW": str(self._delays[Syncing.POSTGRES])}
        variables = " ".join(f"{name}='{value}'" for name, value in environment.items())
        waiting = f"exec 9<'{self._switch}'; flock -s 9; exec 9<&-\n"
        for name, text in {
            "postgres": f"{waiting}exec env {variables} '{found / 'postgres'}' \"$@\"\n",
            "initdb": f"exec '{found / 'initdb'}' \"$@\"\n",
        }.items():
            script = directory / name
            script.write_text(f"#!/bin/sh\n{text}")
            script.chmod(0o755)
        return directory

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Keep Postgres from starting for as long as the context lasts. The caller ends the processes."""
        with self._switch.open() as switch:
            fcntl.flock(switch, fcntl.LOCK_EX)
            yield

    def take_back(self, chance: random.Random | None = None) -> Lost:
        """Undo every change that was not synced. No process may use the files in that time.

        With `chance`, each file keeps its first few unsynced writes, because a kernel writes at times of its own.
        Without it, everything unsynced is lost.
        """
        inodes = {path.lstat().st_ino: path for path in self.watched.rglob("*") if not path.is_dir()}
        inodes |= {path.lstat().st_ino: path for path in self._kept.glob("u-*")}
        files = writes = 0
        for journal in self._kept.glob("f-*"):
            path = inodes.get(int(journal.name[2:]))
            lost = _from(_writes(journal.read_bytes()), chance)
            if path is not None and lost:
                _undo(path, lost)
                files, writes = files + 1, writes + len(lost)
        names = sorted((name for path in self._kept.glob("d-*") for name in _names(path)), key=lambda each: each.moment)
        lost_names = _from(names, chance)
        for name in reversed(lost_names):
            self._take_back_name(name)
        for path in self._kept.iterdir():
            path.unlink()
        return Lost(writes, files, len(lost_names))

    def _take_back_name(self, name: _Name) -> None:
        if name.kind == "C" and (self._kept / f"n-{name.inode}").exists():
            name.path.unlink(missing_ok=True)
        elif name.kind == "R" and name.path.exists() and not name.other.exists():
            name.path.rename(name.other)
        elif name.kind == "U" and not name.path.exists() and name.other.exists():
            os.link(name.other, name.path)


def _from(changes: Sequence[T], chance: random.Random | None) -> Sequence[T]:
    return changes if chance is None else changes[chance.randint(0, len(changes)) :]


def _writes(journal: bytes) -> list[_Write]:
    """Read the recorded changes of a file. If a process was killed, its last record may be incomplete: then the write
    itself has not happened.
    """
    found: list[_Write] = []
    at = 0
    while at + _ENTRY.size <= len(journal):
        old_size, position, length = _ENTRY.unpack_from(journal, at)
        at += _ENTRY.size
        if at + length > len(journal):
            break
        found.append(_Write(old_size, position, journal[at : at + length]))
        at += length
    return found


def _undo(path: Path, writes: Sequence[_Write]) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        for write in reversed(writes):
            os.ftruncate(fd, write.old_size)
            os.pwrite(fd, write.old_bytes, write.position)
    finally:
        os.close(fd)


def _names(journal: Path) -> list[_Name]:
    found: list[_Name] = []
    for line in journal.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            head, path, other = line[:-1].split("\t")
            moment, kind, inode = head.split()
            found.append(_Name(int(moment), kind, int(inode), Path(path), Path(other)))
    return found
