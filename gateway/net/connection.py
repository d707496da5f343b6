"""One client connection: frames in, requests started in order of arrival, answers out in that same order.

The one idea: to its client a connection is sequential, as upstream's is: a request sees what those before it did, for
clients pipeline (librdkafka sends JoinGroup behind an OffsetCommit whose answer it has not seen). So a request starts
when those before it are done, with two exceptions. Produce may follow Produce at once, since the appender keeps their
order and commits them together (and Heartbeat Heartbeat). And what is held for others (a parked JoinGroup, a long
poll) delays only the answers behind it, not the work.

A reply slot is taken for a request when it starts, and only the head of the queue of slots may be written.

Memory is bounded whatever the peer sends: reading stops while too many requests or bytes are unanswered, while the
peer does not read its answers, and, for large frames, while the node as a whole holds too much. What was read and may
not start yet (at most one read of the shared scratch buffer, or one large frame) waits in order.

It neither cuts frames (`protocol/framing.py`) nor knows an API: what a frame means, and how it may be held, it asks a
`RequestHandler` (`gateway/net/dispatch.py`).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, cast

import structlog

from gateway.net.context import ConnectionInfo
from protocol.errors import ProtocolError
from protocol.framing import Frame, FrameSplitter

Chunk = bytes | bytearray | memoryview

SMALL_FRAME_BYTES = 16 * 1024
"""Frames up to this size pass the node's intake even when it is full, so heartbeats survive a storage outage."""
MAX_BULKY_IN_FLIGHT = 4
MAX_KEPT_FRAMES = 64
MAX_KEPT_BYTES = 256 * 1024
"""Reading stops once so much waits for its turn; below it a pipelining client costs no pause and no resume."""
WRITE_HIGH_WATER_BYTES = 512 * 1024
HALF_FRAME_MS = 60_000
"""How long a peer may fall silent in the middle of a frame."""

_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))

log = structlog.stdlib.get_logger(__name__)


class UnanswerableError(ProtocolError):
    """A request that has no answer: the connection closes, and `reason` (one of few) counts it."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Hold(Enum):
    """How a request may be held, and so what happens to it when its peer goes away."""

    NO = "no"
    """Answered as fast as storage allows, and nothing starts behind it until it is done. Finished even if the peer has
    gone, since its effect was asked for."""
    PIPELINED = "pipelined"
    """As NO, but may start beside others of its kind: Produce, whose order the appender keeps, and Heartbeat, which
    changes nothing that a request behind it could see."""
    PARKED = "parked"
    """Waits for other clients (JoinGroup, SyncGroup); cancelled when the peer goes."""
    BULKY = "bulky"
    """Waits for data and answers with megabytes (Fetch); few at a time, cancelled when the peer goes."""

    @property
    def held(self) -> bool:
        """Whether it waits for others, so that requests behind it may be worked on."""
        return self is Hold.PARKED or self is Hold.BULKY


class RequestHandler(Protocol):
    def hold(self, frame: Frame) -> Hold: ...

    def handle(self, frame: Frame, connection: ConnectionInfo) -> Coroutine[Any, Any, Sequence[Chunk]]:
        """The answer as chunks, length prefix included; empty when the request has none (Produce with acks=0).
        ProtocolError closes the connection; it raises nothing else."""
        ...


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_request_bytes: int = 104_857_600
    max_in_flight: int = 1000
    """Requests of one connection that are not yet answered."""
    max_held_bytes: int = 32 * 1024 * 1024
    """Bytes of one connection's unanswered requests and unwritten answers; one request may exceed it alone."""
    max_intake_bytes: int = 96 * 1024 * 1024
    """Bytes of large requests in work on the whole node."""
    max_idle_ms: int = 600_000
    """−1: connections may be idle for ever."""
    max_connections: int = 10_000


class Intake:
    """Bytes of large requests that the node holds. Connections that find it full wait for their turn."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._waiting: dict[Connection, None] = {}

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def has_room(self) -> bool:
        return self._held_bytes < self._limit_bytes

    def take(self, count_bytes: int) -> None:
        self._held_bytes += count_bytes

    def give_back(self, count_bytes: int) -> None:
        self._held_bytes -= count_bytes
        while self._waiting and self.has_room():
            connection = next(iter(self._waiting))
            del self._waiting[connection]
            connection.proceed()

    def wait(self, connection: Connection) -> None:
        self._waiting[connection] = None

    def forget(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)


class ConnectionObserver(Protocol):
    """What a connection tells the server that owns it."""

    def connection_opened(self, connection: Connection) -> bool:
        """False refuses the connection: it is closed at once."""
        ...

    def connection_ended(self, connection: Connection, *, by_peer: bool) -> None:
        """The socket is gone and every request that had to be finished is finished."""
        ...

    def protocol_error(self, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class _Slot:
    """The place of one request in the order of answers."""

    hold: Hold
    frame_bytes: int
    intake_bytes: int
    chunks: Sequence[Chunk] = ()
    answer_bytes: int = 0
    ready: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Connection(asyncio.BufferedProtocol):
    """Serves one socket from `connection_made` to the end of its last request."""

    def __init__(
        self,
        requests: RequestHandler,
        observer: ConnectionObserver,
        limits: ConnectionLimits,
        intake: Intake,
        scratch: bytearray,
        loop: asyncio.AbstractEventLoop,
        listener: str,
    ) -> None:
        self.info = ConnectionInfo(connection_id=secrets.token_hex(12), client_host="", listener=listener)
        self.last_active = loop.time()
        self._requests = requests
        self._observer = observer
        self._limits = limits
        self._intake = intake
        self._scratch = scratch
        self._loop = loop
        self._create_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]] = loop.create_task
        self._transport: asyncio.Transport | None = None
        self._opened = False
        self._closed_by_us = False
        # Receiving
        self._splitter = FrameSplitter(limits.max_request_bytes, scratch)
        self._kept: deque[Frame] = deque()
        self._kept_bytes = 0
        self._reading = True
        self._stopped_reading = False
        # Answering
        self._slots: deque[_Slot] = deque()
        self._held_bytes = 0
        self._bulky_in_flight = 0
        self._alone_in_work = 0
        self._pipelined_in_work = 0
        self._flush_scheduled = False
        self._write_paused = False
        self._finishing: set[asyncio.Task[None]] = set()

    # --- what the server asks -----------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._slots)

    def is_idle(self, now: float) -> bool:
        """Nothing in work and no byte received nor answer given for `max_idle_ms`, or silent within a frame for
        `HALF_FRAME_MS`."""
        silent_ms = (now - self.last_active) * 1000
        max_idle_ms = self._limits.max_idle_ms if self._limits.max_idle_ms >= 0 else float("inf")
        if self._splitter.torn:
            return self._reading and silent_ms > min(HALF_FRAME_MS, max_idle_ms)
        return not self._slots and silent_ms > max_idle_ms

    def stop_reading(self) -> None:
        """Takes no further request, for good; what was started is still answered, then the socket closes (drain)."""
        self._stopped_reading = True
        self._closed_by_us = True
        self._apply_reading(False)
        self._close_if_drained()

    def close(self) -> None:
        """Closes from our side: answers not yet written are lost, no member is blamed for it."""
        self._closed_by_us = True
        if self._transport is not None:
            self._transport.abort()

    def close_idle(self) -> None:
        """Ends a connection that `is_idle`. One that fell silent within a frame has a peer that failed."""
        self._closed_by_us = not self._splitter.torn
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio: opening and closing -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer: tuple[Any, ...] | None = transport.get_extra_info("peername")
        self.info.client_host = f"/{peer[0]}" if peer else "/unknown"
        raw_socket: socket.socket | None = transport.get_extra_info("socket")
        if raw_socket is not None and raw_socket.family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError):
                raw_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEPALIVE:
                    if hasattr(socket, option):
                        raw_socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        self._opened = self._observer.connection_opened(self)
        if not self._opened:
            self.close()

    def eof_received(self) -> bool:
        """A peer that has finished sending may still wait for answers that storage owes it: half-open until they are
        written. With a parked request this is taken for a peer that has gone, as a killed consumer's is."""
        self._stopped_reading = True
        return bool(self._slots) and not any(slot.hold.held for slot in self._slots)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._stopped_reading = True
        self._write_paused = False
        for slot in self._slots:
            if slot.task is not None and not slot.task.done():
                if slot.hold.held:
                    slot.task.cancel()
                self._finish(slot.task)
        # What was read before the peer went is carried out (a LeaveGroup, say); nobody is there to be waited for.
        self._kept = deque(frame for frame in self._kept if not self._requests.hold(frame).held)
        self._run_out()

    def _finish(self, task: asyncio.Task[None]) -> None:
        self._finishing.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._finishing.discard(task)
        self._run_out()

    def _run_out(self) -> None:
        """Without a peer: starts what is left, one after the other, then ends."""
        slots = self._slots
        while slots and slots[0].ready:
            self._held_bytes -= slots.popleft().answer_bytes
        while self._kept and self._start(self._kept[0]):
            self._kept.popleft()
            task = slots[-1].task
            assert task is not None
            self._finish(task)
        if not self._finishing and not self._kept:
            self._intake.forget(self)
            self._end()

    def _end(self) -> None:
        self._slots.clear()
        if self._opened:
            self._opened = False
            self._observer.connection_ended(self, by_peer=not self._closed_by_us)

    def _fail(self, reason: str, error: ProtocolError) -> None:
        if self._transport is None or self._closed_by_us:
            return
        log.warning(
            "connection closed: not the Kafka protocol",
            reason=reason,
            detail=str(error),
            connection=self.info.connection_id,
            client_host=self.info.client_host,
        )
        self._observer.protocol_error(reason)
        # The peer broke the protocol, so for the group coordinator this is a client that failed, not our shutdown.
        self._stopped_reading = True
        self._kept.clear()
        self._transport.abort()

    # --- asyncio: receiving ---------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._splitter.writable()

    def buffer_updated(self, nbytes: int) -> None:
        self.last_active = self._loop.time()
        splitter = self._splitter
        for frame in splitter.received(nbytes):
            if self._kept or not self._start(frame):
                self._kept.append(frame)
                self._kept_bytes += len(frame)
        if self._kept:
            if len(self._kept) >= MAX_KEPT_FRAMES or self._kept_bytes >= MAX_KEPT_BYTES or splitter.broken is not None:
                self._apply_reading(False)
        elif splitter.broken is not None:
            self._fail("frame_size", splitter.broken)
        elif splitter.torn and nbytes > SMALL_FRAME_BYTES and not self._intake.has_room():
            self._intake.wait(self)
            self._apply_reading(False)

    def _start(self, frame: Frame) -> bool:
        """Starts the frame's handler, or returns False while those before it or the limits forbid it."""
        frame_bytes = len(frame)
        if self._alone_in_work or self._write_paused or len(self._slots) >= self._limits.max_in_flight:
            return False
        if self._slots and self._held_bytes + frame_bytes > self._limits.max_held_bytes:
            return False
        hold = self._requests.hold(frame)
        if self._pipelined_in_work and hold is not Hold.PIPELINED:
            return False
        intake_bytes = 0
        if hold is Hold.BULKY:
            if self._bulky_in_flight >= MAX_BULKY_IN_FLIGHT:
                return False
            self._bulky_in_flight += 1
        elif not hold.held and frame_bytes > SMALL_FRAME_BYTES:
            # What is parked, maybe for minutes, is bounded per connection; it must not use up the node's intake.
            if not self._intake.has_room():
                self._intake.wait(self)
                return False
            intake_bytes = frame_bytes
            self._intake.take(intake_bytes)
        if hold is Hold.NO:
            self._alone_in_work += 1
        elif hold is Hold.PIPELINED:
            self._pipelined_in_work += 1
        slot = _Slot(hold, frame_bytes, intake_bytes)
        self._slots.append(slot)
        self._held_bytes += frame_bytes
        # The event loop starts tasks in the order of their creation, so handlers start in the order of arrival.
        slot.task = self._create_task(self._answer(slot, frame))
        return True

    def proceed(self) -> None:
        """Something was freed: start what was kept back, then read on."""
        if self._transport is None:
            if self._opened:
                self._run_out()
            return
        kept = self._kept
        while kept:
            if not self._start(kept[0]):
                return
            self._kept_bytes -= len(kept.popleft())
        if self._splitter.broken is not None:
            self._fail("frame_size", self._splitter.broken)
        else:
            self._apply_reading(not self._write_paused)

    def _apply_reading(self, reading: bool) -> None:
        transport = self._transport
        if transport is None or reading == self._reading or transport.is_closing():
            return
        if reading and self._stopped_reading:
            return
        self._reading = reading
        if reading:
            transport.resume_reading()
        else:
            transport.pause_reading()

    # --- answering ------------------------------------------------------------------------------------------------

    async def _answer(self, slot: _Slot, frame: Frame) -> None:
        chunks: Sequence[Chunk] | None = None
        try:
            chunks = await self._requests.handle(frame, self.info)
        except ProtocolError as error:
            self._fail(error.reason if isinstance(error, UnanswerableError) else "malformed", error)
            return
        finally:
            if slot.hold is Hold.NO:
                self._alone_in_work -= 1
            elif slot.hold is Hold.PIPELINED:
                self._pipelined_in_work -= 1
            if slot.intake_bytes:
                self._intake.give_back(slot.intake_bytes)
            if chunks is None:
                if slot.task is not None:
                    slot.task.add_done_callback(_log_failure)
                if self._transport is not None:
                    self._transport.abort()
        slot.chunks = chunks
        answer_bytes = 0
        for chunk in chunks:
            answer_bytes += len(chunk)
        slot.answer_bytes = answer_bytes
        self._held_bytes += answer_bytes - slot.frame_bytes
        slot.ready = True
        if not self._flush_scheduled and self._slots and (self._slots[0] is slot or self._kept):
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Writes every answer whose turn has come, once per turn of the loop."""
        self._flush_scheduled = False
        slots = self._slots
        while self._transport is not None and not self._write_paused and slots and slots[0].ready:
            chunks: list[Chunk] = []
            gathered_bytes = 0
            while slots and slots[0].ready and gathered_bytes < WRITE_HIGH_WATER_BYTES:
                slot = slots.popleft()
                chunks.extend(slot.chunks)
                gathered_bytes += slot.answer_bytes
                self._held_bytes -= slot.answer_bytes
                if slot.hold is Hold.BULKY:
                    self._bulky_in_flight -= 1
            # As upstream counts: who was answered a moment ago is not idle, however long the answer took.
            self.last_active = self._loop.time()
            if len(chunks) == 1:
                self._transport.write(chunks[0])
            elif chunks:
                self._transport.writelines(chunks)
        if self._kept or not self._reading:
            self.proceed()
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._stopped_reading and not self._slots and not self._kept and self._transport is not None:
            self._transport.close()

    def pause_writing(self) -> None:
        self._write_paused = True
        self._apply_reading(False)

    def resume_writing(self) -> None:
        self._write_paused = False
        self._flush()
        if not self._write_paused:
            self.proceed()


def _log_failure(task: asyncio.Task[None]) -> None:
    """A request that raised what its handler promises not to: a bug of ours, which has closed the connection."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a request ended in an error without an answer", exc_info=error)
