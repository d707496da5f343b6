"""An S3 server as a process: built once from its Go module, started on a directory, stopped, killed, and put behind
faults.

The one idea: the server comes from another project. It checks signatures, ranges, conditions and multi-part uploads as
a store does. `FaultyRoad` is a proxy in front of the server that causes network faults.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import pytest

from tests.gateway_process import free_ports
from tests.go_programs import built

START_SECONDS = 30.0
BUCKET = "records"
ACCESS_KEY, SECRET_KEY = "sluice-test", "sluice-test-secret"


@dataclass(frozen=True, slots=True)
class Program:
    """A server's Go package at one version, and the way to start it."""

    package: str
    version: str
    command: Callable[[Path, Path, int], list[str]]
    environment: Mapping[str, str]
    plain_files: bool
    """True if each object is a plain file of the same name, which a test may truncate, damage and remove."""


def _versitygw(program: Path, directory: Path, port: int) -> list[str]:
    data, metadata = directory / "data", directory / "metadata"
    (data / BUCKET).mkdir(parents=True, exist_ok=True)
    metadata.mkdir(exist_ok=True)
    # Metadata is stored in separate files, because not every file system has extended attributes.
    return [
        str(program),
        *("--port", f"127.0.0.1:{port}", "--quiet"),
        *("posix", "--sidecar", str(metadata), str(data)),
    ]


def _minio(program: Path, directory: Path, port: int) -> list[str]:
    (directory / "data" / BUCKET).mkdir(parents=True, exist_ok=True)
    return [str(program), "server", "--quiet", "--address", f"127.0.0.1:{port}", str(directory / "data")]


PROGRAMS = {
    "versitygw": Program(
        "github.com/versity/versitygw/cmd/versitygw",
        "v1.8.0",
        _versitygw,
        {"ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY},
        plain_files=True,
    ),
    "minio": Program(
        "github.com/minio/minio",
        "v0.0.0-20260212201848-7aac2a2c5b7c",
        _minio,
        {"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY, "MINIO_BROWSER": "off"},
        plain_files=False,
    ),
}
"""Servers by name. The first one is the default, because it builds in a quarter of the other's time."""


def missing() -> str | None:
    """Return why no server can be built on this machine."""
    return None if shutil.which("go") else "go is not installed"


def build(name: str) -> Path:
    """Build the program if it does not exist yet, and return its path."""
    program = PROGRAMS[name]
    return built(program.package, program.version, f"objects/{name}-{program.version}")


class S3Server:
    """One server on one directory; a second `start` continues with its contents."""

    def __init__(self, name: str, directory: Path) -> None:
        self._program = PROGRAMS[name]
        self._built = build(name)
        self._directory = directory
        (self.port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def files(self) -> Path:
        """Directory of the bucket's contents. If objects are not plain files, the test is skipped."""
        if not self._program.plain_files:
            pytest.skip("this server keeps objects in a form of its own")
        return self._directory / "data" / BUCKET

    def start(self) -> None:
        command = self._program.command(self._built, self._directory, self.port)
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **self._program.environment}, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS
        while not _listens(self.port):
            assert self._process.poll() is None, (self._directory / "server.log").read_text()
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Return the settings for obstore. `port` is the port of a proxy to the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


class Fault(Enum):
    """Faults of the proxy."""

    NONE = "none"
    REFUSED = "refused"
    SILENT = "silent"
    """Accept requests and answer none."""
    SLOW = "slow"
    """Delay answers by a second."""
    ERRORS = "errors"
    """Answer every request with 500."""
    BUSY = "busy"
    """Answer every request with 503, as S3 does if a client sends requests too fast."""


SLOW_S = 1.0
PAUSE_S = 0.2
_ANSWERS = {Fault.ERRORS: "500 Internal Server Error", Fault.BUSY: "503 Slow Down"}


class FaultyRoad:
    """A proxy to a port, on a thread of its own. When its fault changes, it ends all connections."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._fault = Fault.NONE
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self.requests = 0
        """Number of connections that met a fault."""
        ready: threading.Event = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self.port = 0
        self._thread.start()
        assert ready.wait(10)

    def __enter__(self) -> FaultyRoad:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def set(self, fault: Fault) -> None:
        done = threading.Event()

        def change() -> None:
            self._fault = fault
            for task in self._connections:
                task.cancel()
            done.set()

        self._loop.call_soon_threadsafe(change)
        assert done.wait(10)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._met, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()
        server.close()
        for task in self._connections:
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.1))
        self._loop.close()

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._pass(reader, writer)
        except (OSError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault = self._fault
        if fault in (Fault.NONE, Fault.SLOW):
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._to)
            try:
                delay_s = SLOW_S if fault is Fault.SLOW else 0.0
                await asyncio.gather(_pipe(reader, upstream_writer, 0.0), _pipe(upstream_reader, writer, delay_s))
            finally:
                upstream_writer.transport.abort()
            return
        self.requests += 1
        if fault is Fault.REFUSED:
            return
        if fault in _ANSWERS:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 {_ANSWERS[fault]}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
            writer.write_eof()
        while await reader.read(65_536):
            pass


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Bytes after a pause are the beginning of an answer. Delay them."""
    came_at = -PAUSE_S
    while piece := await reader.read(1 << 20):
        if time.monotonic() - came_at > PAUSE_S:
            await asyncio.sleep(delay_s)
        came_at = time.monotonic()
        writer.write(piece)
        await writer.drain()
    writer.write_eof()
