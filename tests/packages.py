"""Lock files, and gateways that are installed outside the sources."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gateway_process import answers

ROOT = Path(__file__).parents[1]
RUNTIME_LOCK, BUILD_LOCK, DEVELOPMENT_LOCK = "requirements.lock", "requirements-build.lock", "requirements-dev.lock"
START_SECONDS = 60


def locked(name: str) -> dict[str, tuple[Requirement, int]]:
    """Return each requirement of a lock file, and the number of its hashes, by canonical name."""
    entries = re.split(r"\n(?=\S)", (ROOT / name).read_text().replace("\\\n", " "))
    found: dict[str, tuple[Requirement, int]] = {}
    for entry in entries:
        requirement = Requirement(re.split(r"\s--hash|\s#|\n", entry)[0].strip())
        found[canonicalize_name(requirement.name)] = (
            requirement,
            len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry)),
        )
    return found


def outside(**more: str) -> dict[str, str]:
    """Return an environment without traces of this suite's make and virtual environment."""
    hidden = ("MAKE", "MFLAGS", "VIRTUAL_ENV", "PYTHONPATH", "SLUICE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(hidden)} | more


class serving:  # noqa: N801  (reads as a verb: with serving(...))
    """Run a command that serves on `bootstrap` while the context lasts. SIGTERM ends the command, and its exit code
    must be 0.
    """

    def __init__(self, command: list[str], directory: Path, environment: dict[str, str], bootstrap: str) -> None:
        self._command = command
        self._directory = directory
        self._environment = environment
        self._bootstrap = bootstrap
        self._output = directory / "output.txt"

    def __enter__(self) -> Path:
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._directory,
                env=self._environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not answers(self._bootstrap):
            assert self._process.poll() is None, self._output.read_text()
            assert time.monotonic() < deadline, self._output.read_text()
            time.sleep(0.01)
        return self._output

    def __exit__(self, *_: object) -> None:
        # Signal the whole session, because Ctrl-C in a terminal also reaches make and its child processes.
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise
