"""A real gateway in its own process. Tests start, stop, kill and restart it as a user does."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

import psutil

from tests.forks import Fork, Forks

ROOT = Path(__file__).parents[1]
START_SECONDS = 60.0
STOP_SECONDS = 15.0
POLL_SECONDS = 0.01
LOG_TAIL_LINES = 200

# A whole ApiVersions v0 request: key 18, version 0, correlation id 1, client id "probe".
_PROBE = struct.pack(">ihhih5s", 15, 18, 0, 1, 5, b"probe")

# A FindCoordinator v0 request: key 10, version 0, correlation id 1, client id "probe", group "probe".
_FIND_COORDINATOR = struct.pack(">ihhih5sh5s", 22, 10, 0, 1, 5, b"probe", 5, b"probe")


def clean_environment() -> dict[str, str]:
    """Return this process's environment without settings of the gateway."""
    return {name: value for name, value in os.environ.items() if not is_own_variable(name)}


def is_own_variable(name: str) -> bool:
    """Return whether the gateway itself reads the variable. The interpreter or a library may read any other."""
    return name.startswith("SLUICE_")


class GatewayProcess:
    """One `sluice serve`. `restart` keeps the port, the database and the settings."""

    def __init__(
        self,
        directory: Path,
        *,
        database_url: str | None,
        settings: Mapping[str, str],
        environment: Mapping[str, str],
        root: Path = ROOT,
        forks: Forks | None = None,
        start_s: float = START_SECONDS,
    ) -> None:
        """`root` is the directory of the sources to run, for example those of another release. With `forks`, the
        gateway may start as a fork of another process, which saves a second of CPU. That is impossible if `root` is
        given, or if `environment` has variables that the gateway does not read itself. `start_s` is how long the
        gateway may take to serve.
        """
        self._root = root
        self._start_s = start_s
        self._forks = forks if root == ROOT and all(map(is_own_variable, environment)) else None
        self.data_dir = directory
        self.log_path = directory / "gateway.log"
        self.database_url = database_url
        port, metrics_port = free_ports(2)
        self.bootstrap = f"127.0.0.1:{port}"
        if "listeners" in settings:
            self.bootstrap = settings["listeners"].split(",")[0].partition("://")[2]
        self.metrics_url = f"http://127.0.0.1:{metrics_port}"
        self._arguments = [
            *(sys.executable, "-m", "gateway.cli", "serve"),
            *("--metrics-listen", f"127.0.0.1:{metrics_port}"),
            *("--data-dir", str(directory)),
        ]
        if "listeners" not in settings:
            self._arguments += ["--listen", self.bootstrap]
        if database_url is not None:
            self._arguments += ["--database-url", database_url]
        for name, value in {"console.listen": "", **settings}.items():
            self._arguments += ["--set", f"{name}={value}"]
        self._environment = {**clean_environment(), **environment}
        self._process: subprocess.Popen[bytes] | Fork | None = None
        self._paused: list[psutil.Process] = []

    @property
    def process(self) -> subprocess.Popen[bytes] | Fork:
        assert self._process is not None, "the gateway was not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the gateway and wait until it answers ApiVersions. Raise AssertionError with the end of the log if that
        fails."""
        assert not self.running
        with self.log_path.open("ab") as log:
            self._process = self._started(log)
        deadline = time.monotonic() + self._start_s
        while not answers(self.bootstrap):
            returncode = self._process.poll()
            if returncode is not None:
                raise AssertionError(f"the gateway ended with {returncode}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the gateway did not serve in {self._start_s:.0f} s:\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)

    def _started(self, log: IO[bytes]) -> subprocess.Popen[bytes] | Fork:
        if self._forks is None:
            return subprocess.Popen(
                self._arguments, cwd=self._root, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        words = self._arguments[self._arguments.index("gateway.cli") + 1 :]
        return self._forks.start(words, directory=self._root, environment=self._environment, log=log)

    def stop(self) -> int:
        """Send SIGTERM, wait for the end, and return the exit code. Raise AssertionError if it does not drain within
        STOP_SECONDS.
        """
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the gateway did not stop in {STOP_SECONDS:.0f} s:\n{self.log_tail()}") from None

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send kill −9, and wait until the kernel has removed the process."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Start again after a stop or a kill. A running gateway is stopped first."""
        if self.running:
            self.stop()
        self.start()

    def close(self) -> None:
        self.resume_postgres()
        if self.running:
            self.stop()

    # --- its embedded Postgres --------------------------------------------------------------------------------

    @property
    def postgres_pid_path(self) -> Path:
        return self.data_dir / "postgres" / "postmaster.pid"

    @property
    def postgres_pid(self) -> int:
        return int(self.postgres_pid_path.read_text().partition("\n")[0])

    def kill_postgres(self) -> None:
        """Kill the postmaster with kill −9, and wait until the gateway has started another."""
        killed = self.postgres_pid
        os.kill(killed, signal.SIGKILL)
        deadline = time.monotonic() + START_SECONDS
        while not self.postgres_pid_path.exists() or self.postgres_pid == killed:
            assert time.monotonic() < deadline, f"no new Postgres in {START_SECONDS:.0f} s:\n{self.log_tail()}"
            time.sleep(POLL_SECONDS)

    def pause_postgres(self) -> None:
        """Stop every process of the server, so that it neither answers nor refuses."""
        postmaster = psutil.Process(self.postgres_pid)
        # Stop the postmaster first, because a process that it forks in the meantime would still answer.
        postmaster.suspend()
        self._paused = [postmaster, *postmaster.children(recursive=True)]
        for process in self._paused[1:]:
            process.suspend()

    def resume_postgres(self) -> None:
        for process in self._paused:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self._paused = []

    # --- its log ----------------------------------------------------------------------------------------------

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-LOG_TAIL_LINES:])


class GatewayFactory(Protocol):
    """Starts gateways that end with the test."""

    def __call__(
        self,
        settings: Mapping[str, str] = ...,
        *,
        embedded: bool = False,
        database_url: str | None = None,
        environment: Mapping[str, str] = ...,
        root: Path = ...,
        coordinated: bool = ...,
    ) -> GatewayProcess:
        """Start a gateway; see `GatewayProcess`.

        If `coordinated` is false, no client looks up a group's coordinator before the test.

        `settings` are Kafka's settings, as for `--set`. They replace SETTINGS of `tests/conftest.py`.

        With `embedded` the gateway runs its own Postgres. Otherwise it uses `database_url`, or a fresh database of the
        suite's server.
        """
        ...


def find_coordinator(bootstrap: str) -> None:
    """Look up a group's coordinator, as every client does before its first group request. If the listener requires
    authentication, the gateway ignores this request.
    """
    host, _, port = bootstrap.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=START_SECONDS) as connection:
        connection.sendall(_FIND_COORDINATOR)
        connection.recv(8, socket.MSG_WAITALL)


def answers(bootstrap: str) -> bool:
    """Return whether an ApiVersions v0 round trip succeeds."""
    host, _, port = bootstrap.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(_PROBE)
            return len(connection.recv(8, socket.MSG_WAITALL)) == 8
    except OSError:
        return False


PORTS = range(12_000, 32_000)
"""Ports below the range from which the kernel chooses ports of outgoing connections."""
SLICE = 400

_next_offset = [random.randrange(SLICE)]
"""The offset in its range at which this process looks next. It begins at random, because two processes share a range if
all others are taken.
"""


@functools.cache
def _own_slice() -> range:
    """Reserve a range of ports for this process. No other test process uses the range while this process holds its
    lock. The lock ends with the process.
    """
    slices = [PORTS[at : at + SLICE] for at in range(0, len(PORTS), SLICE)]
    random.shuffle(slices)
    directory = Path(tempfile.gettempdir())
    for ports in slices:
        try:
            lock = os.open(directory / f"sluice-ports-{ports.start}-{os.getuid()}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        return ports  # The lock file stays open until the process ends.
    return slices[0]


def free_ports(count: int, *, in_a_row: int = 1) -> list[int]:
    """Return ports without a listener. With `in_a_row`, each returned port is followed by that many free ports, itself
    included. The process goes round its range, so a port is returned again after nearly all others.
    """
    return [_next_row(in_a_row) for _ in range(count)]


def _next_row(length: int) -> int:
    """Return the first port of the next free row. Raise `OSError` if the range of this process has none."""
    ports, start = _own_slice(), _next_offset[0]
    for offset in (*range(start, SLICE - length + 1), *range(min(start, SLICE - length + 1))):
        if all(map(_is_free, ports[offset : offset + length])):
            _next_offset[0] = (offset + length) % SLICE
            return ports[offset]
    raise OSError(f"of ports {ports.start} to {ports.stop - 1}, no {length} in a row are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
