"""`python -m bench.stalls DIRECTORY`: how the disk answers a stranger, while something else is measured.

The one idea: a disk that is shared, as a virtual machine's is, stands still now and then for whoever writes. A process
of its own writes a page into a file of its own and syncs it, again and again, and tells how long each time took. What a
server was asked while such a sync hung says something of the disk, not of the server.

It ends when its standard input does, and prints [[started, seconds], ...] in the clock of `time.perf_counter`, which
all processes of a Linux machine share.
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
"""A sync of one page that takes so long has met a stall; the disk's usual is a tenth of it."""
AFTER_S = 0.02
"""So long after a stall what waited for its end is still being answered."""
PAUSE_S = 0.01
PAGES = 64
_PAGE_BYTES = 4096
_STOP_S = 30.0


@dataclass(slots=True)
class Disk:
    """What `watching` has seen, in the order of time; empty until it has ended."""

    syncs: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """(started, seconds) of each sync."""

    @property
    def p99_ms(self) -> float:
        return statistics.quantiles((seconds for _, seconds in self.syncs), n=100)[98] * 1000

    def stalls(self) -> list[tuple[float, float]]:
        """(begin, end) of what took `STALL_S` or longer, with the time that it takes to get over it."""
        return [(start, start + seconds + AFTER_S) for start, seconds in self.syncs if seconds >= STALL_S]

    def apart(self, spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Those of the (begin, end) spans that touch no stall."""
        stalls = self.stalls()
        begins = [begin for begin, _ in stalls]

        def touches(begin: float, end: float) -> bool:
            # Syncs follow one another, so of the stalls that began in time the last is over last.
            begun = bisect.bisect_right(begins, end)
            return begun > 0 and stalls[begun - 1][1] >= begin

        return [span for span in spans if not touches(*span)]


@contextlib.contextmanager
def watching(directory: Path) -> Iterator[Disk]:
    """While entered, a stranger syncs a file in the directory."""
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
