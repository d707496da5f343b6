"""`python -m bench.delay UPSTREAM SECONDS`: forward every connection to a server's Unix socket, and delay each
direction, as a network would.

Each piece of data is kept until the moment at which it is due. So a direction holds the data of one delay, and its
throughput is not reduced. asyncio's timers are as fine as its selector, and only `select` waits for parts of a
millisecond.

The process prints the port that it listens at on standard output, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

HELD_BYTES = 16 * 1024 * 1024
"""Bytes that one direction may hold before the process stops reading from its sender: far more than arrives within a
millisecond.
"""
_PR_SET_TIMERSLACK = 29
_STOP_S = 5.0


class _Direction:
    """Bytes that are forwarded from `source` to `sink`."""

    def __init__(self, delay_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._delay_s = delay_s
        self._held: deque[tuple[float, bytes | None]] = deque()
        """Pieces of data, each with the moment at which it is due; None ends the direction."""
        self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._full = False
        self.source: asyncio.Transport | None = None
        self.sink: asyncio.Transport | None = None

    def hear(self, data: bytes | None) -> None:
        self._held.append((self._loop.time() + self._delay_s, data))
        self._held_bytes += len(data or b"")
        self.look()

    def look(self) -> None:
        """Forward the pieces that are due. If more pieces are held, schedule the next call."""
        if self.sink is None:
            return
        now_s = self._loop.time()
        while self._held and self._held[0][0] <= now_s:
            _, data = self._held.popleft()
            if data is None:
                self.sink.close()
            else:
                self._held_bytes -= len(data)
                self.sink.write(data)
        if self._held and self._timer is None:
            self._timer = self._loop.call_at(self._held[0][0], self._wake)
        self.throttle()

    def _wake(self) -> None:
        self._timer = None
        self.look()

    def throttle(self) -> None:
        if self.source is None or self.sink is None or self.source.is_closing():
            return
        full = self._held_bytes + self.sink.get_write_buffer_size() > HELD_BYTES
        if full != self._full:
            self._full = full
            (self.source.pause_reading if full else self.source.resume_reading)()


class _End(asyncio.Protocol):
    """One end of a connection. It sends into one direction and receives from the other."""

    def __init__(self, says: _Direction, hears: _Direction) -> None:
        self._says, self._hears = says, hears

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        # Call resume_writing only after the sink has taken all bytes.
        transport.set_write_buffer_limits(high=0)
        self._says.source = self._hears.sink = transport
        self._hears.look()

    def data_received(self, data: bytes) -> None:
        self._says.hear(data)

    def resume_writing(self) -> None:
        self._hears.throttle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._says.hear(None)


async def _serve(upstream: str, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    opening: set[asyncio.Task[None]] = set()

    def accept() -> _End:
        to_server, to_client = _Direction(delay_s), _Direction(delay_s)

        async def reach() -> None:
            try:
                await loop.create_unix_connection(lambda: _End(to_client, to_server), upstream)
            except OSError:
                to_client.hear(None)

        task = loop.create_task(reach())
        opening.add(task)
        task.add_done_callback(opening.discard)
        return _End(to_server, to_client)

    server = await loop.create_server(accept, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


@contextlib.contextmanager
def delayed(upstream: Path, delay_s: float) -> Iterator[int]:
    """Run a process that forwards connections while the context lasts. Yield its port."""
    command = [sys.executable, "-m", "bench.delay", str(upstream), str(delay_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.stdin.close()
        process.wait(_STOP_S)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    upstream, delay_s = sys.argv[1:]
    # A network does not wait for a CPU core. If this process has the right to raise its priority, it does not wait
    # either.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    # Otherwise the kernel may delay a wake-up by 0.05 ms to combine it with others.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    try:
        loop.run_until_complete(_serve(upstream, float(delay_s)))
    finally:
        loop.close()


if __name__ == "__main__":
    main()
