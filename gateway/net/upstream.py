"""A connection to another node that carries the requests of one client's connection.

The one idea: to the called node, this connection is the client. Requests leave in the order of their arrival, and
responses arrive in the same order, so each response belongs to the oldest request that waits. The connection ends with
the client's. If it fails, every request that waits fails.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from ssl import SSLContext
from typing import cast

from gateway.net.context import ConnectionInfo
from gateway.net.holdings import SMALL_BYTES, Share
from gateway.net.node_proof import MAC_BYTES, NONCE_BYTES, WELCOME, NodeProofError, claim, farewell, hello
from protocol.framing import Frame, FrameSplitter
from storage.types import Address, Node

CONNECT_S = 5.0
"""How long a connection and its proof may take. A client waits longer for any response."""
MAX_ANSWER_BYTES = 256 * 1024 * 1024
"""Largest response that is accepted. A node answers with less. Before its proof the peer may be a stranger, and may
send no more than a proof."""
PATIENCE_S = 5.0
"""How long a large response waits for room. Those that hold the room may wait for room, too."""


class UpstreamError(Exception):
    """Error: the called node does not respond. Whether it has processed the request is unknown."""


@dataclass(frozen=True, slots=True)
class Called:
    """How a node is called."""

    node: Node
    address: Address
    key: bytes
    tls: SSLContext | None


@dataclass(slots=True, eq=False)
class _Waiting:
    answer: asyncio.Future[Frame]
    correlation_id: bytes
    """First bytes of the response. Empty for a response of the proof."""
    is_parked: bool


class Upstream(asyncio.BufferedProtocol):
    """One connection to a node. It connects when it is created; `send` does not wait for that."""

    def __init__(
        self, called: Called, client: ConnectionInfo, scratch: bytearray, ended: Callable[[Upstream], None]
    ) -> None:
        self.node = called.node
        self._called = called
        self._client = client
        self._ended = ended
        self._splitter = FrameSplitter(NONCE_BYTES + MAC_BYTES, scratch)
        self._arriving = Share(client.holdings)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[_Waiting] = deque()
        self._unsent: list[Frame] = []
        self._is_proved = False
        self._is_finishing = False
        self._failure: UpstreamError | None = None
        self._pausing: asyncio.Task[None] | None = None
        self._connecting = asyncio.create_task(self._connect())

    @property
    def is_open(self) -> bool:
        """True if further requests may be sent. Before the proof nothing has been sent, and nothing has been ended."""
        return self._failure is None and not (self._is_finishing and self._is_proved)

    def send(self, frame: Frame, *, is_parked: bool) -> asyncio.Future[Frame]:
        """Send a request. The result yields its response, or raises UpstreamError."""
        if self._is_proved:
            return self._write(frame, bytes(frame[4:8]), is_parked)
        answer = self._expect(bytes(frame[4:8]), is_parked)
        if self._failure is None:
            self._unsent.append(frame)
        return answer

    def finish(self) -> None:
        """Let the called node know that the client has gone. It still processes what was sent, except parked
        requests."""
        self._is_finishing = True
        wanted = [each for each in self._waiting if each.correlation_id and not each.answer.done()]
        if all(each.is_parked for each in wanted):
            # Do not wait until the node has read these requests. It may be muting the client, and they may be large.
            for each in wanted:
                each.answer.cancel()
            self.fail("the client has gone")
        elif self._is_proved:
            self._write_eof()

    def give_up_parked(self) -> None:
        """Fail the requests that wait for other clients or for data."""
        for each in self._waiting:
            if each.is_parked and not each.answer.done():
                each.answer.set_exception(UpstreamError("this node stops"))

    def say_farewell(self) -> None:
        """Let the called node know that this node stops, so that it does not take the client for gone."""
        if self._is_proved:
            self._write(farewell(), b"", is_parked=False).cancel()

    def fail(self, reason: str) -> None:
        """End the connection, and fail every request that waits."""
        if self._failure is None:
            self._failure = UpstreamError(f"node {self.node.node_id}: {reason}")
            self._connecting.cancel()
            self._unsent.clear()
            self._arriving.become(0)
            self._ended(self)
        while self._waiting:
            answer = self._waiting.popleft().answer
            if not answer.done():
                answer.set_exception(self._failure)
        if self._transport is not None:
            self._transport.abort()

    # --- connecting -----------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        loop, called = asyncio.get_running_loop(), self._called
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.create_connection(lambda: self, *called.address, ssl=called.tls)
                nonce = secrets.token_bytes(NONCE_BYTES)
                answer = await self._ask(hello(nonce))
                if await self._ask(claim(called.key, called.node.node_id, nonce, answer, self._client)) != WELCOME:
                    raise NodeProofError("the node does not accept the proof")
        except (OSError, TimeoutError, NodeProofError, UpstreamError) as error:
            self.fail(str(error) or f"no connection in {CONNECT_S:.0f} s")
            return
        self._is_proved = True
        self._splitter.max_frame_bytes = MAX_ANSWER_BYTES
        assert self._transport is not None
        for frame in self._unsent:
            self._transport.writelines((len(frame).to_bytes(4, "big"), frame))
        self._unsent.clear()
        if self._is_finishing:
            self._write_eof()

    async def _ask(self, frame: bytes) -> bytes:
        """Send a frame of the proof ahead of all requests, and return its response."""
        assert self._transport is not None
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting.appendleft(_Waiting(answer, b"", is_parked=False))
        self._transport.write(len(frame).to_bytes(4, "big") + frame)
        return bytes(await answer)

    def _expect(self, correlation_id: bytes, is_parked: bool) -> asyncio.Future[Frame]:
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            answer.set_exception(self._failure)
        else:
            self._waiting.append(_Waiting(answer, correlation_id, is_parked))
        return answer

    def _write(self, frame: Frame, correlation_id: bytes, is_parked: bool) -> asyncio.Future[Frame]:
        answer = self._expect(correlation_id, is_parked)
        if self._failure is None and self._transport is not None:
            self._transport.writelines((len(frame).to_bytes(4, "big"), frame))
        return answer

    def _write_eof(self) -> None:
        """End the direction to the node, so that it knows that the client has gone. TLS has no half-open connection."""
        assert self._transport is not None
        if self._waiting and self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    # --- asyncio --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._failure is not None:
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._splitter.writable()

    def buffer_updated(self, nbytes: int) -> None:
        for frame in self._splitter.received(nbytes):
            if not self._is_awaited(frame):
                self.fail("a response that belongs to no request")
                return
            answer = self._waiting.popleft().answer
            if not answer.done():
                answer.set_result(frame)
        if self._splitter.broken is not None:
            self.fail(str(self._splitter.broken))
            return
        self._arriving.become(self._splitter.partial_bytes)
        if self._splitter.partial_bytes > SMALL_BYTES and not self._client.holdings.has_room():
            self._pause()

    def _is_awaited(self, frame: Frame) -> bool:
        """Return whether the frame belongs to the oldest request that waits. Before the proof no request has been sent,
        and a stranger at the node's address could guess the client's correlation id."""
        if not self._waiting:
            return False
        correlation_id = self._waiting[0].correlation_id
        return frame.startswith(correlation_id) and (self._is_proved or not correlation_id)

    def _pause(self) -> None:
        """Read no more of a large response until the node has room for it."""
        if self._pausing is None and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._pausing = asyncio.create_task(self._read_on())

    async def _read_on(self) -> None:
        await self._client.holdings.room(PATIENCE_S)
        self._pausing = None
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.fail("the connection was lost" if exc is None else str(exc))
