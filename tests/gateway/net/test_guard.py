"""A guard in front of a connection's requests: its limits, and a last answer after which nothing is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from gateway.net.connection import UNKNOWN_MS, ConnectionLimits
from gateway.net.context import ConnectionInfo
from gateway.net.requests import Admission, LastAnswerError
from gateway.net.server import Server
from gateway.operate.metrics import Metrics
from protocol.buffer import Buffer
from protocol.framing import Frame
from tests.gateway.net.words import Node, Words, framed

MOST = 100


class Door:
    """A guard that admits a client that sends the right word. It accepts no second wrong word."""

    max_request_bytes = MOST

    def __init__(self, words: Words) -> None:
        self._words = words
        self._open = False
        self.passed: Callable[[], None] = lambda: None

    def admission(self, frame: Frame) -> Admission:
        return self._words.admission(frame) if self._open else Admission()

    async def handle(self, frame: Frame, connection: ConnectionInfo) -> Sequence[Buffer]:
        if self._open:
            return await self._words.handle(frame, connection)
        if bytes(frame) == b"sesame":
            self._open = True
            self.passed()
            return (framed(b"in"),)
        await asyncio.sleep(0)
        raise LastAnswerError("authentication_failed", "not the word", (framed(b"out"),))


@pytest.fixture
async def served() -> AsyncIterator[Node]:
    made = Node(ConnectionLimits())
    made.server = Server(made.metrics, ConnectionLimits())
    made.port = await made.server.bind("127.0.0.1", 0, "GUARDED")
    guards = {"GUARDED": lambda: Door(made.words)}
    await made.server.serve(made.words, made.connection_closed, guards=guards)
    yield made
    await made.server.close()


async def test_refused_client_is_answered_and_later_requests_are_dropped(served: Node) -> None:
    peer = await served.connect()
    peer.send(b"open", b"sesame", b"-echo:0")
    assert await peer.ended() == framed(b"out")
    assert served.words.started == []
    assert served.closed_for("authentication_failed") == 1


async def test_admitted_client_is_served(served: Node) -> None:
    peer = await served.connect()
    peer.send(b"sesame", b"-echo:0")
    assert await peer.answers(2) == [b"in", b"-echo:0"]
    peer.send(b"-echo:" + b"1" * MOST)
    assert (await peer.answer()).startswith(b"-echo:1")


async def test_client_that_sends_too_much_before_admission_is_closed(served: Node) -> None:
    peer = await served.connect()
    peer.send(b"x" * (MOST + 1))
    assert await peer.ended() == b""
    assert served.closed_for("frame_size") == 1


async def test_client_that_stays_unknown_is_closed(served: Node) -> None:
    silent, known = await served.connect(), await served.connect()
    known.send(b"sesame")
    assert await known.answer() == b"in"
    later = asyncio.get_running_loop().time() + UNKNOWN_MS / 1000 + 1
    idle = [connection for connection in served.server.connections if connection.is_idle(later)]
    assert len(idle) == 1
    idle[0].close_idle()
    assert await silent.ended() == b""
    known.send(b"-echo:0")
    assert await known.answer() == b"-echo:0"


async def test_one_listener_alone_is_guarded() -> None:
    served = Node(ConnectionLimits())
    served.server = Server(Metrics(), ConnectionLimits())
    served.port = await served.server.bind("127.0.0.1", 0, "OPEN")
    await served.server.serve(served.words, served.connection_closed, guards={"GUARDED": lambda: Door(served.words)})
    peer = await served.connect()
    peer.send(b"-echo:0")
    assert await peer.answer() == b"-echo:0"
    later = asyncio.get_running_loop().time() + UNKNOWN_MS / 1000 + 1
    assert not any(connection.is_idle(later) for connection in served.server.connections)
    await served.server.close()
