"""Run a command of `sluice` as a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import IO

from tests.forks import forks
from tests.gateway_process import ROOT, clean_environment

TIMEOUT_S = 120.0


class Command:
    """A command that runs in a fork (`tests/forks.py`), with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, *words: str, said: str = "") -> None:
        """`said` is the standard input."""
        # They are closed when they have been read.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as given:
            given.write(said.encode())
            given.seek(0)
            self._fork = forks().start(
                words,
                directory=ROOT,
                environment=clean_environment(),
                log=self._output,
                errors=self._errors,
                given=given,
            )
        self._told: tuple[str, str] | None = None
        self.poll, self.kill, self.send_signal = self._fork.poll, self._fork.kill, self._fork.send_signal

    @property
    def returncode(self) -> int | None:
        return self._fork.returncode

    def communicate(self, timeout: float = TIMEOUT_S) -> tuple[str, str]:
        """Wait for the end, and return both outputs."""
        self._fork.wait(timeout)
        if self._told is None:
            self._told = _content(self._output), _content(self._errors)
        return self._told


def _content(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode()


def sluice(*words: str, said: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its exit code and both outputs. `said` is its standard input."""
    command = Command(*words, said=said)
    output, errors = command.communicate()
    return subprocess.CompletedProcess(words, command.returncode or 0, output, errors)


def interpreted(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in an interpreter of its own, which imports only what the command needs."""
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *words],
        cwd=ROOT,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def output_of(*words: str, run: Callable[..., subprocess.CompletedProcess[str]] = sluice) -> str:
    """Run a command that must succeed, and return its output."""
    done = run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
