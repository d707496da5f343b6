"""Run a command within its limit, and end everything that it started.

The one idea: a command leads a process group of its own. Once the leader has ended or the limit has passed, the whole
group is killed before the leader is reaped. Until then the group's number cannot belong to another process.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

_leaders: set[int] = set()
"""Leaders of the running process groups, so that all groups can be ended."""

LAST_LINES_SECONDS = 10.0
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a command. `returncode` is negative for a signal. `timed_out` means that the command was killed at its
    limit.
    """

    returncode: int
    timed_out: bool


@dataclass(frozen=True, slots=True)
class Limit:
    """Time limits of commands. Each command has its own limit. All commands that share this object also end after
    `seconds` from now, or when `end` is called.
    """

    seconds: float = math.inf
    started: float = field(default_factory=time.monotonic)
    _ended: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """End all commands that share this limit."""
        self._ended.set()

    @property
    def left_s(self) -> float:
        return 0.0 if self._ended.is_set() else max(0.0, self.started + self.seconds - time.monotonic())

    def of(self, limit_s: float) -> float:
        return min(limit_s, self.left_s)

    def reached(self, limit_s: float) -> str:
        """Name the limit that a command reached: its own, or that of the whole run."""
        if self.left_s > 0:
            return f"its limit of {limit_s:.0f} s"
        if self._ended.is_set():
            return "the end of the whole run"
        return f"the limit of the whole run, {self.seconds:.0f} s"


def run_limited(
    command: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    limit_s: float,
    stderr: Path,
    on_line: Callable[[str], None],
) -> Ended:
    """Run a command, pass each line of its stdout to `on_line`, and append its stderr to a file. Raise OSError if the
    command cannot start.
    """
    with stderr.open("ab") as errors:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    assert process.stdout is not None
    reader = threading.Thread(target=_read_lines, args=(process.stdout, on_line), daemon=True)
    reader.start()
    ended = threading.Event()
    waiter = threading.Thread(target=_wait_unreaped, args=(process.pid, ended), daemon=True)
    waiter.start()
    _leaders.add(process.pid)
    timed_out = True
    try:
        timed_out = not ended.wait(limit_s)
    finally:
        _kill_group(process.pid)
        waiter.join()
        _leaders.discard(process.pid)
        process.wait()
    reader.join(LAST_LINES_SECONDS)
    return Ended(process.returncode, timed_out)


def end_all() -> None:
    """Kill every running command. Each caller then sees its command end."""
    for leader in list(_leaders):
        _kill_group(leader)


def _wait_unreaped(pid: int, ended: threading.Event) -> None:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ended.set()


def _kill_group(leader: int) -> None:
    """Send SIGKILL to the leader's group, stopped processes included, and to descendants that left the group."""
    strays: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        strays = psutil.Process(leader).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    for stray in strays:
        with contextlib.suppress(psutil.NoSuchProcess):
            stray.kill()


def _read_lines(stream: BinaryIO, on_line: Callable[[str], None]) -> None:
    with stream:
        while line := stream.readline(MAX_LINE_BYTES):
            on_line(line.decode(errors="replace").rstrip("\r\n"))
