"""One client connection: frames in, requests started in order of arrival, answers out in that same order.

The one idea: a connection is sequential to its client, as upstream's is. A request sees the effects of those before it,
because clients pipeline (librdkafka sends JoinGroup behind an OffsetCommit whose answer it has not seen). So a request
starts when those before it are done, with the exceptions that `gateway/net/requests.py` names. Produce, OffsetCommit
and Heartbeat may follow each other at once. A request that waits for other clients or data (a parked JoinGroup, a long
poll) delays only the answers behind it, not the work.

A request takes a reply slot when it starts, and only the head of the queue of slots may be written.

Memory is bounded whatever the peer sends. Reading stops while too many requests or bytes are unanswered, while the peer
does not read its answers, while it is muted, and while the node as a whole holds too much (`gateway/net/holdings.py`).
Requests that were read and may not start yet (at most one read of the shared scratch buffer, or one large frame) wait
in order. A peer that makes no progress, in sending or in reading, is closed.

This module neither cuts frames (`protocol/framing.py`) nor knows an API. A `RequestHandler` (`gateway/net/dispatch.py`)
tells the meaning of a frame and its place among others.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

import structlog

from gateway.net.context import ConnectionInfo
from gateway.net.holdings import SMALL_BYTES, Holdings
from gateway.net.networks import network_of
from gateway.net.requests import Admission, Guard, LastAnswerError, Order, RequestHandler, UnanswerableError
from protocol.buffer import Buffer
from protocol.errors import ProtocolError
from protocol.framing import Frame, FrameSplitter

MAX_BULKY_IN_FLIGHT = 4
MAX_KEPT_FRAMES = 64
MAX_KEPT_BYTES = 256 * 1024
"""Reading stops once this many bytes wait for their turn. Below it a pipelining client costs no pause and no resume."""
WRITE_HIGH_WATER_BYTES = 512 * 1024
MIN_READ_BYTES = 1024
"""Bytes that a connection may read before it learns that its address or the node is full."""
HALF_FRAME_MS = 60_000
"""Longest silence of a peer in the middle of a frame."""
UNREAD_MS = 60_000
"""How long a peer may accept no byte of its waiting answers before the node closes the connection."""
UNREAD_WHEN_FULL_MS = 5_000
"""The same limit while the node holds its maximal number of bytes."""

REQUEST_BYTES = 6 * 1024
"""Memory of a request that waits behind others, besides its own bytes: a task and its handler's objects. A thousand
requests of two hundred bytes occupy six megabytes."""

UNKNOWN_MS = 60_000
"""How long a peer that must authenticate may stay unauthenticated."""

_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))

logger = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_request_bytes: int = 104_857_600
    max_in_flight: int = 1000
    """Maximal number of unanswered requests of one connection."""
    max_held_bytes: int = 32 * 1024 * 1024
    """Bytes of one connection's unanswered requests and unwritten answers; one request may exceed it alone."""
    max_node_bytes: int = 128 * 1024 * 1024
    """Bytes that all connections of the node hold in work and answers, and as many again in requests that are still
    arriving. One request, and one answer, may exceed the limit.
    """
    max_idle_ms: int = 600_000
    """Longest time without traffic. −1 means that connections may be idle for ever."""
    max_connections: int = 10_000


class ConnectionObserver(Protocol):
    """The events that a connection reports to the server that created it."""

    def connection_opened(self, connection: Connection) -> float | None:
        """Return None to accept the connection. Otherwise the connection is refused, and closed unread after that
        many seconds."""
        ...

    def connection_ended(self, connection: Connection, *, by_peer: bool) -> None:
        """Note that the socket is closed, and that every request that had to be finished is finished."""
        ...

    def protocol_error(self, reason: str) -> None: ...


@dataclass(slots=True, eq=False)
class _Slot:
    """The position of one request in the order of answers."""

    admission: Admission
    held_bytes: int
    """Bytes of the request and of the work on it until it is answered; then bytes of the answer."""
    request: Coroutine[object, None, Sequence[Buffer]] = field(repr=False)
    chunks: Sequence[Buffer] = ()
    ready: bool = False
    in_work: bool = True
    """True until the request is done. A task that is cancelled before it begins runs none of its code."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Connection(asyncio.BufferedProtocol):
    """Serves one socket from `connection_made` to the end of its last request."""

    def __init__(
        self,
        requests: RequestHandler,
        observer: ConnectionObserver,
        limits: ConnectionLimits,
        holdings: Holdings,
        scratch: bytearray,
        loop: asyncio.AbstractEventLoop,
        listener: str,
        guard: Guard | None = None,
    ) -> None:
        self.info = ConnectionInfo(
            connection_id=secrets.token_hex(12), client_host="", listener=listener, holdings=holdings
        )
        self.address = ""
        """The peer's host. It stays that of a node that forwards the requests of a client."""
        self.network = ""
        self.last_active = loop.time()
        self._requests: RequestHandler = requests if guard is None else guard
        self._observer = observer
        self._limits = limits
        self._holdings = holdings
        self._scratch = scratch
        self._loop = loop
        self._create_task: Callable[[Coroutine[object, None, None]], asyncio.Task[None]] = loop.create_task
        self._transport: asyncio.Transport | None = None
        self._opened = False
        self._closed_by_us = False
        # Receiving
        self._splitter = FrameSplitter(limits.max_request_bytes if guard is None else guard.max_request_bytes, scratch)
        self._guarded_until = float("inf")
        """Time until which the peer must have authenticated."""
        if guard is not None:
            self._guarded_until = loop.time() + UNKNOWN_MS / 1000
            guard.passed = self._pass
        self._kept: deque[Frame] = deque()
        self._kept_bytes = 0
        self._partial_bytes = 0
        """Bytes received of a frame that is not yet whole. Those of whole frames are `_kept_bytes`."""
        self._arriving_bytes = 0
        """The part of these bytes that counts towards the limits of the address and the node."""
        self._unmute: asyncio.TimerHandle | None = None
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
        self._unsent_bytes = 0
        """Bytes that the peer has left in the socket's buffer, counted once they are more than a few."""
        self._unread: tuple[int, float] = (0, 0.0)
        """Number of bytes that the peer had left unread at the last check, and the time since which that number is
        unchanged."""
        self._finishing: set[asyncio.Task[None]] = set()

    # --- what the server asks -----------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._slots)

    @property
    def is_reading(self) -> bool:
        """True if the connection currently accepts bytes from its peer."""
        return self._reading

    def is_idle(self, now: float) -> bool:
        """Return True if no request is in work, and no byte was received and no answer given for `max_idle_ms`. Also
        return True if the peer was silent within a frame for `HALF_FRAME_MS`, or if it must authenticate but has not
        done so within `UNKNOWN_MS`.
        """
        if now > self._guarded_until:
            return True
        silent_ms = (now - self.last_active) * 1000
        max_idle_ms = self._limits.max_idle_ms if self._limits.max_idle_ms >= 0 else float("inf")
        in_work = bool(self._slots or self._kept)
        if self._splitter.torn and (self._reading or not in_work):
            return silent_ms > min(HALF_FRAME_MS, max_idle_ms)
        return not in_work and silent_ms > max_idle_ms

    def is_stalled(self, now: float) -> bool:
        """Return True if the peer leaves answers unread: it accepted no byte of them for `UNREAD_MS`, or for less
        while the node is full. Call this regularly."""
        self._count_unsent()
        unread_bytes = self._unsent_bytes
        if not unread_bytes or unread_bytes != self._unread[0]:
            self._unread = (unread_bytes, now)
            return False
        patience_ms = UNREAD_MS if self._holdings.has_room() else UNREAD_WHEN_FULL_MS
        if self._limits.max_idle_ms >= 0:
            patience_ms = min(patience_ms, self._limits.max_idle_ms)
        return (now - self._unread[1]) * 1000 > patience_ms

    def refuse(self, reason: str, detail: str) -> None:
        """Close the connection of a peer that cannot be served."""
        self._fail(reason, UnanswerableError(reason, detail))

    def _pass(self) -> None:
        self._guarded_until = float("inf")
        self._splitter.max_frame_bytes = self._limits.max_request_bytes

    def stop_reading(self) -> None:
        """Accept no further request, for good. Requests that were started are still answered, then the socket closes
        (drain)."""
        self._stopped_reading = True
        self._closed_by_us = True
        self._apply_reading(False)
        self._close_if_drained()

    def close(self) -> None:
        """Close from our side. Unwritten answers are lost, and no group member is blamed for it."""
        self._closed_by_us = True
        if self._transport is not None:
            self._transport.abort()

    def close_idle(self) -> None:
        """Close a connection that `is_idle`. If it fell silent within a frame, its peer has failed."""
        self._closed_by_us = not self._splitter.torn
        if self._transport is not None:
            self._transport.abort()

    def close_failed(self) -> None:
        """Close a connection whose peer reads no answers, or hardly sends its request."""
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio: opening and closing -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer: tuple[object, ...] | None = transport.get_extra_info("peername")
        self.address = self.info.client_host = f"/{peer[0]}" if peer else "/unknown"
        self.network = network_of(self.address)
        raw_socket: socket.socket | None = transport.get_extra_info("socket")
        if raw_socket is not None and raw_socket.family in (socket.AF_INET, socket.AF_INET6):
            with suppress(OSError):
                raw_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEPALIVE:
                    if hasattr(socket, option):
                        raw_socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        refused_for_s = self._observer.connection_opened(self)
        self._opened = refused_for_s is None
        if refused_for_s:
            self._stopped_reading = True
            self._transport.pause_reading()
            self._loop.call_later(refused_for_s, self.close)
        elif refused_for_s is not None:
            self.close()

    def eof_received(self) -> bool:
        """Keep the connection half-open until its answers are written, because a peer that has finished sending may
        still wait for them. With a parked request the peer counts as gone, as a killed consumer's is."""
        self._stopped_reading = True
        self.info.lose_peer()
        return bool(self._slots) and not any(slot.admission.order is Order.PARKED for slot in self._slots)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._stopped_reading = True
        self.info.lose_peer()
        self._write_paused = False
        self._holdings.forget(self)
        self._count_unsent()
        if self._unmute is not None:
            self._unmute.cancel()
            self._unmute = None
        self.info.muted_until_s = 0.0
        for slot in self._slots:
            if slot.task is None or slot.task.done():
                slot.ready = True
            else:
                if _matters_to_peer_alone(slot.admission):
                    slot.task.cancel()
                self._finish(slot, slot.task)
        # Execute the requests that were read before the peer went (for example LeaveGroup), except those that only
        # concern the peer.
        self._kept = deque(frame for frame in self._kept if not _matters_to_peer_alone(self._requests.admission(frame)))
        self._kept_bytes = sum(map(len, self._kept))
        self._partial_bytes = 0
        self._run_out()

    def _finish(self, slot: _Slot, task: asyncio.Task[None]) -> None:
        self._finishing.add(task)
        task.add_done_callback(partial(self._finished, slot))

    def _finished(self, slot: _Slot, task: asyncio.Task[None]) -> None:
        self._finishing.discard(task)
        # This includes a request that was cancelled, maybe before it began: it has ended, and must not delay those
        # behind it.
        slot.request.close()
        self._leave_work(slot)
        slot.ready = True
        self._run_out()

    def _leave_work(self, slot: _Slot) -> None:
        """Note that the slot's request is done. Calling this twice is no error."""
        if not slot.in_work:
            return
        slot.in_work = False
        if slot.admission.order is Order.ALONE:
            self._alone_in_work -= 1
        elif slot.admission.order is not Order.PARKED:
            self._pipelined_in_work -= 1

    def _run_out(self) -> None:
        """Process the remaining requests without a peer, one after the other, and then end."""
        slots = self._slots
        while slots and slots[0].ready:
            self._forget(slots.popleft())
        while self._kept and self._start(self._kept[0]):
            self._kept_bytes -= len(self._kept.popleft())
            slot = slots[-1]
            assert slot.task is not None
            self._finish(slot, slot.task)
        self._count_arriving()
        if not self._finishing and not self._kept:
            self._holdings.forget(self)
            self._end()

    def _forget(self, slot: _Slot) -> None:
        """Drop a slot whose answer is written, or whose peer is gone."""
        if slot.admission.bulky:
            self._bulky_in_flight -= 1
        self._hold(-slot.held_bytes)

    def _hold(self, more_bytes: int) -> None:
        """Count the bytes that this connection holds, for itself and for the node. A decrease may allow other
        connections to continue."""
        self._held_bytes += more_bytes
        if more_bytes > 0:
            self._holdings.take(more_bytes)
        elif more_bytes:
            self._holdings.give_back(-more_bytes)

    def _end(self) -> None:
        while self._slots:
            self._forget(self._slots.popleft())
        if self._opened:
            self._opened = False
            by_peer = not (self._closed_by_us or self.info.is_blameless)
            self._observer.connection_ended(self, by_peer=by_peer)

    def _fail(self, reason: str, error: ProtocolError) -> None:
        if self._transport is None or self._closed_by_us:
            return
        what = "a request without an answer" if isinstance(error, UnanswerableError) else "not the Kafka protocol"
        logger.warning(
            f"connection closed: {what}",
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
        writable = self._splitter.writable()
        room_bytes = self._holdings.room_for(self, len(writable))
        if room_bytes < len(writable):
            return writable[: max(room_bytes, SMALL_BYTES - self._partial_bytes, MIN_READ_BYTES)]
        return writable

    def buffer_updated(self, nbytes: int) -> None:
        self.last_active = self._loop.time()
        splitter = self._splitter
        frames = splitter.received(nbytes)
        for frame in frames:
            if self._kept or not self._start(frame):
                self._kept.append(frame)
                self._kept_bytes += len(frame)
        self._partial_bytes = splitter.partial_bytes
        if self._partial_bytes or self._arriving_bytes or self._kept:
            self._count_arriving()
        if self._kept:
            if (
                len(self._kept) >= MAX_KEPT_FRAMES
                or self._kept_bytes >= MAX_KEPT_BYTES
                or splitter.broken is not None
                or self.info.muted_until_s
                or not self._holdings.has_room()
                or (self._arriving_bytes and not self._holdings.room_for(self, 1))
            ):
                self._apply_reading(False)
        elif splitter.broken is not None:
            self._fail("frame_size", splitter.broken)
        elif not self._may_read_on():
            self._apply_reading(False)

    def _count_arriving(self) -> None:
        """Count a large request that is arriving, or that has arrived and may not start yet."""
        kept_bytes = self._kept_bytes if self._kept_bytes > MAX_KEPT_BYTES else 0
        arriving_bytes = max(self._partial_bytes + kept_bytes - SMALL_BYTES, 0)
        if arriving_bytes != self._arriving_bytes:
            more_bytes, self._arriving_bytes = arriving_bytes - self._arriving_bytes, arriving_bytes
            self._holdings.arrive(self, more_bytes)

    def _may_read_on(self) -> bool:
        return not self._arriving_bytes or self._holdings.may_read_on(self)

    def _start(self, frame: Frame) -> bool:
        """Start the frame's handler. Return False if earlier requests or the limits do not permit it yet."""
        frame_bytes = len(frame)
        if self._alone_in_work or self._write_paused or len(self._slots) >= self._limits.max_in_flight:
            return False
        if self.info.muted_until_s:
            return False
        if self._slots and self._held_bytes + frame_bytes > self._limits.max_held_bytes:
            return False
        admission = self._requests.admission(frame)
        order = admission.order
        pipelined = order is Order.PIPELINED or order is Order.PLACED
        if self._pipelined_in_work and not pipelined:
            return False
        if admission.bulky and self._bulky_in_flight >= MAX_BULKY_IN_FLIGHT:
            return False
        # A connection's only request counts no overhead: the number of connections bounds it.
        held_bytes = frame_bytes + REQUEST_BYTES if self._slots else frame_bytes
        if not self._holdings.has_room():
            # A request that waits for data checks the room when it has some. One such request of each connection may
            # continue.
            large = admission.bulky and (
                order is not Order.PARKED or self._bulky_in_flight > 0 or self._holdings.overdrawn()
            )
            if large or self._held_bytes + held_bytes > SMALL_BYTES:
                self._holdings.wait(self)
                return False
        if admission.bulky:
            self._bulky_in_flight += 1
        if order is Order.ALONE:
            self._alone_in_work += 1
        elif pipelined:
            self._pipelined_in_work += 1
        # This call takes a place in order. The event loop starts tasks in the order of their creation.
        slot = _Slot(admission, held_bytes, self._requests.handle(frame, self.info))
        self._slots.append(slot)
        self._held_bytes += held_bytes
        self._holdings.take(held_bytes)
        slot.task = self._create_task(self._answer(slot))
        return True

    def proceed(self) -> None:
        """Continue after memory was freed: start the requests that were kept back, and then read."""
        if self._transport is None:
            if self._opened:
                self._run_out()
            return
        kept = self._kept
        while kept and self._start(kept[0]):
            self._kept_bytes -= len(kept.popleft())
        self._count_arriving()
        if kept:
            return
        if self._splitter.broken is not None:
            self._fail("frame_size", self._splitter.broken)
        else:
            paused = self._write_paused or bool(self.info.muted_until_s)
            self._apply_reading(not paused and (self._stopped_reading or self._may_read_on()))

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

    async def _answer(self, slot: _Slot) -> None:
        chunks: Sequence[Buffer] | None = None
        try:
            chunks = slot.chunks = await slot.request
        except LastAnswerError as last:
            chunks = slot.chunks = last.chunks
            self._observer.protocol_error(last.reason)
            self._stopped_reading = True
            self._kept.clear()
            self._kept_bytes = 0
            self._count_arriving()
            self._apply_reading(False)
        except ProtocolError as error:
            self._fail(error.reason if isinstance(error, UnanswerableError) else "malformed", error)
            return
        finally:
            self._leave_work(slot)
            if chunks is None:
                if slot.task is not None:
                    slot.task.add_done_callback(_log_failure)
                if self._transport is not None:
                    self._transport.abort()
        if self.info.muted_until_s:
            self._keep_muted()
        answer_bytes = 0
        for chunk in slot.chunks:
            answer_bytes += len(chunk)
        self._hold(answer_bytes - slot.held_bytes)
        slot.held_bytes = answer_bytes
        slot.ready = True
        if not self._flush_scheduled and self._slots and (self._slots[0] is slot or self._kept):
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write every answer whose turn has come, once per turn of the loop."""
        self._flush_scheduled = False
        slots = self._slots
        while self._transport is not None and not self._write_paused and slots and slots[0].ready:
            chunks: list[Buffer] = []
            gathered_bytes = 0
            while slots and slots[0].ready and gathered_bytes < WRITE_HIGH_WATER_BYTES:
                slot = slots.popleft()
                if not self.info.skipped:
                    chunks.extend(slot.chunks)
                gathered_bytes += slot.held_bytes
                if slot.admission.bulky:
                    self._bulky_in_flight -= 1
            # Upstream counts the same: a client that was answered a moment ago is not idle, however long the answer
            # took.
            self.last_active = self._loop.time()
            if len(chunks) == 1:
                self._transport.write(chunks[0])
            elif chunks:
                self._transport.writelines(chunks)
            # Do this last: other connections may wake because of it, and they may wake this one.
            self._hold(-gathered_bytes)
        if self._kept or not self._reading:
            self.proceed()
        self._close_if_drained()

    def _keep_muted(self) -> None:
        """Start and read nothing until the time that dispatch has set (KIP-219)."""
        self._apply_reading(False)
        if self._unmute is not None:
            self._unmute.cancel()
        self._unmute = self._loop.call_at(self.info.muted_until_s, self._unmuted)

    def _unmuted(self) -> None:
        self._unmute = None
        if self._loop.time() < self.info.muted_until_s:
            # In the meantime a request in work was throttled for longer. It is answered later.
            self._keep_muted()
            return
        self.info.muted_until_s = 0.0
        self.proceed()

    def _close_if_drained(self) -> None:
        if self._stopped_reading and not self._slots and not self._kept and self._transport is not None:
            self._transport.close()

    def pause_writing(self) -> None:
        self._write_paused = True
        self._apply_reading(False)
        self._count_unsent()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._count_unsent()
        self._flush()
        if not self._write_paused:
            self.proceed()

    def _count_unsent(self) -> None:
        unsent_bytes = self._transport.get_write_buffer_size() if self._transport is not None else 0
        self._hold(unsent_bytes - self._unsent_bytes)
        self._unsent_bytes = unsent_bytes


def _matters_to_peer_alone(admission: Admission) -> bool:
    """Return True if only the client needs the request's result, so that it need not finish without the client."""
    return admission.order is Order.PARKED or admission.bulky


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log a request that raised what its handler promises not to raise: a bug of ours, which has closed the
    connection."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a request failed without an answer", exc_info=error)
