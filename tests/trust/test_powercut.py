"""The disk with simulated power cuts: synced changes stay, all others are undone."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trust.powercut import Disk, Syncing, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler is installed (Debian: gcc)")


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def run_on(disk: Disk, script: str) -> None:
    """Run Python code in the watched directory, with the library preloaded."""
    subprocess.run(
        [sys.executable, "-c", f"import os\nD = os.open('.', os.O_RDONLY)\n{script}"],
        cwd=disk.watched,
        env={**os.environ, **disk.environment},
        check=True,
        timeout=30,
    )


def contents(disk: Disk) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in disk.watched.iterdir()}


SYNCED = """
fd = os.open('file', os.O_RDWR | os.O_CREAT)
os.write(fd, b'first.')
os.fsync(fd)
os.fsync(D)
"""


@pytest.mark.parametrize(
    "change",
    [
        "os.write(fd, b'second.')",
        "os.pwrite(fd, b'SECOND.', 3)",
        "os.pwritev(fd, [b'SEC', b'OND'], 0)",
        "os.ftruncate(fd, 2)",
        "os.posix_fallocate(fd, 0, 100_000)",
        "os.ftruncate(fd, 0); os.write(fd, b'x' * 200_000)",
        "open('file', 'wb').write(b'other')",
        "open('file', 'ab').write(b'other')",
        "os.unlink('file')",
        "os.rename('file', 'renamed')",
        "open('new', 'wb').write(b'new'); os.rename('new', 'file')",
        "os.unlink('file'); open('file', 'wb').write(b'new')",
        "open('new', 'wb').write(b'new')",
        "os.pwrite(fd, b'A', 0); os.rename('file', 'b'); os.pwrite(fd, b'B', 1); os.unlink('b')",
    ],
)
def test_change_without_a_sync_is_taken_back(disk: Disk, change: str) -> None:
    run_on(disk, SYNCED + change)
    disk.take_back()
    assert contents(disk) == {"file": b"first."}


@pytest.mark.parametrize("sync", ["os.fsync(fd)", "os.fdatasync(fd)"])
def test_write_that_was_synced_stays(disk: Disk, sync: str) -> None:
    run_on(disk, f"{SYNCED}os.write(fd, b'second.')\n{sync}\nos.write(fd, b'third.')")
    disk.take_back()
    assert contents(disk) == {"file": b"first.second."}


@pytest.mark.parametrize("sync", ["os.fsync(fd)", "os.fdatasync(fd)", "os.fsync(D)"])
def test_sync_of_a_slow_disk_takes_as_long_as_was_said(disk: Disk, sync: str) -> None:
    run_on(disk, SYNCED)
    reopened = "fd = os.open('file', os.O_RDWR)\n"
    disk.slow_down(Syncing.NODES, 0.5)
    run_on(disk, f"{reopened}import time\nbegan_s = time.monotonic()\n{sync}\nassert time.monotonic() >= began_s + 0.5")
    disk.slow_down(Syncing.NODES, 3_600)
    disk.speed_up()
    run_on(disk, reopened + sync)


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("os.rename('file', 'renamed')", {"renamed": b"first."}),
        ("os.unlink('file')", {}),
        ("os.rename('file', 'a'); os.rename('a', 'b')", {"b": b"first."}),
    ],
)
def test_name_whose_directory_was_synced_stays(disk: Disk, change: str, left: dict[str, bytes]) -> None:
    run_on(disk, f"{SYNCED}{change}\nos.fsync(D)")
    disk.take_back()
    assert contents(disk) == left


def test_new_file_stays_once_it_or_its_directory_was_synced(disk: Disk) -> None:
    run_on(
        disk, "open('a', 'wb')\nos.fsync(D)\nfd = os.open('b', os.O_RDWR | os.O_CREAT)\nos.fsync(fd)\nopen('c', 'wb')"
    )
    disk.take_back()
    assert contents(disk) == {"a": b"", "b": b""}


def test_second_cut_takes_back_only_what_came_after_the_first(disk: Disk) -> None:
    run_on(disk, SYNCED + "os.write(fd, b'lost.')")
    disk.take_back()
    run_on(
        disk,
        "fd = os.open('file', os.O_RDWR | os.O_APPEND)\nos.write(fd, b'kept.')\nos.fsync(fd)\nos.write(fd, b'lost.')",
    )
    disk.take_back()
    assert contents(disk) == {"file": b"first.kept."}


def test_file_may_keep_its_first_unsynced_writes(disk: Disk) -> None:
    run_on(disk, SYNCED + "\nfor digit in b'12345':\n    os.write(fd, bytes([digit]))")
    disk.take_back(random.Random(1))
    (found,) = contents(disk).values()
    assert b"first.12345".startswith(found)
    assert found.startswith(b"first.")


def test_files_outside_of_the_watched_directory_are_left_alone(disk: Disk, tmp_path: Path) -> None:
    run_on(disk, "open('../outside', 'wb').write(b'outside')")
    disk.take_back()
    assert (tmp_path / "outside").read_bytes() == b"outside"
