"""A server whose requests are single words instead of Kafka's requests, and its clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Sequence

from gateway.net.connection import ConnectionLimits
from gateway.net.context import ConnectionInfo
from gateway.net.requests import Admission, Order
from gateway.net.server import Server
from gateway.operate.metrics import Metrics
from protocol.buffer import Buffer
from protocol.errors import ProtocolError
from protocol.framing import Frame

ADMISSIONS = {
    b"p": Admission(Order.PARKED),
    b"b": Admission(Order.PARKED, bulky=True),
    b"r": Admission(Order.ALONE, bulky=True),
    b"l": Admission(Order.PIPELINED),
}


def framed(*bodies: bytes) -> bytes:
    return b"".join(struct.pack(">i", len(body)) + body for body in bodies)


class Words:
    """A protocol of words. A frame is `<admission letter><verb>:<rest>`. The test decides when and how a frame is
    answered; the answer repeats the frame.
    """

    def __init__(self) -> None:
        self.started: list[bytes] = []
        self.cancelled: list[bytes] = []
        self.finished: list[bytes] = []
        self.gates: dict[bytes, asyncio.Event] = {}
        self.arrival = asyncio.Event()
        self.cancellation = asyncio.Event()
        self.mute_s = 0.0

    def admission(self, frame: Frame) -> Admission:
        return ADMISSIONS.get(bytes(frame[:1]), Admission())

    def gate(self, body: bytes) -> asyncio.Event:
        return self.gates.setdefault(body, asyncio.Event())

    async def handle(self, frame: Frame, connection: ConnectionInfo) -> Sequence[Buffer]:
        body = bytes(frame)
        name = body[:40]
        self.started.append(name)
        self.arrival.set()
        verb = body[1:].partition(b":")[0]
        if verb == b"throttle":
            await self.gate(b"throttle").wait()
            connection.muted_until_s = asyncio.get_running_loop().time() + self.mute_s
        if verb in (b"wait", b"throttle"):
            try:
                await self.gate(name).wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                self.cancellation.set()
                raise
        self.finished.append(name)
        self.arrival.set()
        if verb == b"mute":
            connection.muted_until_s = asyncio.get_running_loop().time() + self.mute_s
        if verb == b"silent":
            return ()
        if verb == b"refuse":
            raise ProtocolError("refused")
        if verb == b"bug":
            raise RuntimeError("bug")
        if verb == b"big":
            return (struct.pack(">i", 300_000), bytes(300_000))
        return (framed(name),)

    async def until_cancelled(self) -> None:
        await asyncio.wait_for(self.cancellation.wait(), 10)

    async def until_started(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.started) < count:
                self.arrival.clear()
                await self.arrival.wait()


class Node:
    """A server that speaks this protocol, and the events that it reported."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.words = Words()
        self.metrics = Metrics()
        self.server = Server(self.metrics, limits)
        self.gone: asyncio.Queue[str] = asyncio.Queue()
        self.forgotten: asyncio.Queue[str] = asyncio.Queue()
        self.port = 0
        self._settling: Peer | None = None

    def connection_closed(self, connection_id: str, by_peer: bool) -> None:
        (self.gone if by_peer else self.forgotten).put_nowait(connection_id)

    async def connect(self, address: str = "127.0.0.1") -> Peer:
        """Connect from an address of this machine."""
        return Peer(*await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0)))

    async def settle(self) -> None:
        """Run many turns of the loop with traffic of another connection, so that all pending work is done.

        That other connection stays open, so that `gone` lists only the test's own connections.
        """
        if self._settling is None:
            self._settling = await self.connect()
        for index in range(50):
            self._settling.send(b"-echo:settle %d" % index)
            await self._settling.answer()

    @property
    def held_bytes(self) -> float:
        return self.metrics.registry.get_sample_value("sluice_held_bytes") or 0.0

    async def until_held(self, count_bytes: int) -> None:
        async with asyncio.timeout(30):
            while self.held_bytes < count_bytes:
                await self.settle()

    def finished_of(self, prefix: bytes) -> list[bytes]:
        return [name for name in self.words.finished if name.startswith(prefix)]

    def closed_for(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("sluice_protocol_errors_total", {"reason": reason}) or 0.0


class Peer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *bodies: bytes) -> None:
        self.writer.write(framed(*bodies))

    async def answer(self) -> bytes:
        async with asyncio.timeout(30):
            (size,) = struct.unpack(">i", await self.reader.readexactly(4))
            return await self.reader.readexactly(size)

    async def answers(self, count: int) -> list[bytes]:
        return [await self.answer() for _ in range(count)]

    def reset(self) -> None:
        """Reset the connection, as the kernel does if a killed process has left bytes unread. No FIN precedes the
        reset.
        """
        raw_socket: socket.socket = self.writer.get_extra_info("socket")
        raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def ended(self) -> bytes:
        """Return the bytes that arrived before the server closed the connection."""
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionResetError):
                return await self.reader.read()
        return b""


class Accepted(asyncio.Transport):
    """The transport of a connection from an address that this machine does not have."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 40_000, 0, 0)})
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0
