"""Start commands of `sluice` by forks of a process that has imported the gateway once.

An import of the gateway takes a second of CPU, which is more than everything else at a gateway's start. A parent
process, `python -m tests.forks DESCRIPTOR`, imports the gateway and then forks for each request. A request is one
packet on a socket: JSON with the arguments, the directory and the environment, and the descriptors of a pipe and of the
child's streams. The answer is the child's process id. When the child has ended, its wait status is written into the
pipe. The parent process ends with the process that started it, because the socket then closes. Its children continue.

A child has everything that a new process has: its own arguments, directory, environment, standard streams and session
of signals. It differs in three ways: all children share one hash seed, interpreter settings (PYTHON…, LD_…) have no
effect, and the interpreter is not finalized at the end. So a test that sets variables of other programs than Sluice
starts an interpreter instead.

A child's first write to a page that it shares with the parent process makes the kernel copy the page. These copies are
most of a child's cost. The garbage collector writes to every object that it visits, and so does the finalization of an
interpreter. So the parent process excludes its objects from garbage collection, and a child ends as soon as all exit
handlers have run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
IMPORTED = ("gateway.cli", "gateway.serve", "gateway.node", "gateway.operate.http", "gateway.operate.workers")
"""Modules that `sluice serve` imports, directly or indirectly."""
MAX_PACKET_BYTES = 128 * 1024
_STATUS = struct.Struct("i")


class Fork:
    """A child of the parent process, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, arguments: Sequence[str], ended: int) -> None:
        """`ended` is the reading end of the pipe that receives the child's wait status."""
        self.pid = pid
        self.returncode: int | None = None
        self._arguments = arguments
        self._ended = ended
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or minus the number of the signal that ended the process. Raise
        subprocess.TimeoutExpired after `timeout` seconds."""
        with self._lock:
            if self.returncode is None:
                waiting = select.poll()  # select() does not accept a descriptor above 1023
                waiting.register(self._ended, select.POLLIN)
                if not waiting.poll(None if timeout is None else timeout * 1_000):
                    raise subprocess.TimeoutExpired(list(self._arguments), timeout or 0)
                packet = os.read(self._ended, _STATUS.size)
                os.close(self._ended)
                assert packet, "the parent process of all forks has ended"
                self.returncode = os.waitstatus_to_exitcode(_STATUS.unpack(packet)[0])
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """The parent process of all forks of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(other.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )

    @property
    def parent_pid(self) -> int:
        return self._process.pid

    def start(
        self,
        arguments: Sequence[str],
        *,
        directory: Path,
        environment: Mapping[str, str],
        log: IO[bytes],
        errors: IO[bytes] | None = None,
        given: IO[bytes] | None = None,
    ) -> Fork:
        """Start `sluice` with arguments. `log` receives its output and, unless `errors` receives them, its errors. The
        command reads `given`, or nothing.
        """
        streams = {1: log, 2: errors or log} | ({} if given is None else {0: given})
        ended, written = os.pipe()
        try:
            request = {
                "arguments": list(arguments),
                "directory": str(directory),
                "environment": dict(environment),
                "streams": list(streams),
            }
            descriptors = [written, *(stream.fileno() for stream in streams.values())]
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
                answer = self._socket.recv(MAX_PACKET_BYTES)
        finally:
            os.close(written)
        assert answer, "the parent process of all forks has ended"
        return Fork(int(answer), arguments, ended)


@functools.cache
def forks() -> Forks:
    """Return this process's Forks, which the first call creates."""
    return Forks()


# --- the parent process -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Child:
    pid: int
    status: int
    """Descriptor of the pipe that receives the wait status."""


def _serve(requests: socket.socket) -> Sequence[str]:
    """Fork for each request until the socket closes. In a child, return its arguments; in the parent, exit."""
    waiting = selectors.DefaultSelector()
    waiting.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if isinstance(key.data, _Child):
                waiting.unregister(key.fd)
                os.close(key.fd)
                _report(key.data)
                continue
            packet, descriptors, _, _ = socket.recv_fds(requests, MAX_PACKET_BYTES, 4)
            if not packet:
                sys.exit(0)
            status, *streams = descriptors
            pid = os.fork()
            if not pid:
                _close_inherited(waiting)
                return _become(json.loads(packet), streams, status)
            for stream in streams:
                os.close(stream)
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, _Child(pid, status))
            requests.send(str(pid).encode())


def _report(child: _Child) -> None:
    _, status = os.waitpid(child.pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(child.status, _STATUS.pack(status))
    os.close(child.status)


def _close_inherited(waiting: selectors.BaseSelector) -> None:
    for key in list(waiting.get_map().values()):
        if isinstance(key.data, _Child):
            os.close(key.data.status)
            os.close(key.fd)
        elif isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
    waiting.close()


def _become(request: dict[str, Any], streams: Sequence[int], status: int) -> Sequence[str]:
    os.close(status)
    for number, stream in zip(request["streams"], streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    sys.argv[1:] = request["arguments"]
    return sys.argv[1:]


class _Ending:
    """Ends this process, if it is a child."""

    def __init__(self) -> None:
        self.code = 1
        """Exit code of the process. Until the command returns, it is the code for an exception."""
        self._parent_pid = os.getpid()
        # Exit handlers run in the reverse order of their registration, so this one runs after those of all imported
        # modules.
        atexit.register(self._end)

    def _end(self) -> None:
        if os.getpid() != self._parent_pid:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(self.code)


def _command(arguments: Sequence[str]) -> int:
    from gateway.cli import main

    try:
        return main(arguments)
    except SystemExit as refused:  # an argument parser's exit
        if isinstance(refused.code, int):
            return refused.code
        raise
    except KeyboardInterrupt:
        sys.stdout.flush()
        # End as an interpreter does. `_Ending` would turn this into an exit code.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        raise


if __name__ == "__main__":
    ending = _Ending()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    ending.code = _command(_serve(socket.socket(fileno=int(sys.argv[1]))))
    sys.exit(ending.code)
