"""`python -m bench.stalls DIRECTORY`: measure how long the disk takes to sync, while another measurement runs.

A shared disk, like a virtual machine's, stalls now and then for every writer. A separate process writes a page into a
file of its own and syncs the file repeatedly, and records how long each sync took. The latency of a request during such
a stall is caused by the disk and not by the server.

The process ends when its standard input does, and prints [[started, seconds], ...] in the clock of `time.perf_counter`,
which all processes of a Linux machine share.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

STALL_S = 0.005
"""If a sync of one page takes this long, the disk has stalled. A usual sync takes a tenth of it."""
AFTER_S = 0.02
"""Seconds after a stall in which delayed requests are still being answered."""
PAUSE_S = 0.01
PAGES = 64
_PAGE_BYTES = 4096
_STOP_S = 30.0


@dataclass(slots=True)
class Disk:
    """The syncs that `watching` has measured, in order of time. Empty until the context has ended."""

    syncs: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Start time and duration in seconds of each sync."""

    @property
    def p99_ms(self) -> float:
        return statistics.quantiles((seconds for _, seconds in self.syncs), n=100)[98] * 1000

    def stalls(self) -> list[tuple[float, float]]:
        """Return (begin, end) of each sync that took `STALL_S` or longer, extended by the recovery time `AFTER_S`."""
        return [(start, start + seconds + AFTER_S) for start, seconds in self.syncs if seconds >= STALL_S]

    def apart(self, spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return the (begin, end) spans that overlap no stall."""
        stalls = self.stalls()
        begins = [begin for begin, _ in stalls]

        def touches(begin: float, end: float) -> bool:
            # Syncs follow one another. So if several stalls began before the span's end, the last of them also ends
            # last.
            begun = bisect.bisect_right(begins, end)
            return begun > 0 and stalls[begun - 1][1] >= begin

        return [span for span in spans if not touches(*span)]


@contextlib.contextmanager
def watching(directory: Path) -> Iterator[Disk]:
    """Sync a file in the directory from a separate process while the context lasts."""
    disk = Disk()
    command = [sys.executable, "-m", "bench.stalls", str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield disk
        told, _ = process.communicate("", timeout=_STOP_S)
        disk.syncs = [(start, seconds) for start, seconds in json.loads(told)]
    finally:
        process.kill()
        process.wait()


def _watch(directory: str) -> None:
    syncs: list[tuple[float, float]] = []
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        fd = file.fileno()
        os.pwrite(fd, os.urandom(PAGES * _PAGE_BYTES), 0)
        os.fsync(fd)
        number = 0
        while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
            started = time.perf_counter()
            os.pwrite(fd, os.urandom(_PAGE_BYTES), number % PAGES * _PAGE_BYTES)
            os.fdatasync(fd)
            syncs.append((started, time.perf_counter() - started))
            number += 1
    print(json.dumps(syncs))


if __name__ == "__main__":
    _watch(sys.argv[1])
