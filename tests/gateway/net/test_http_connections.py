"""Peers that open connections to an HTTP server and ask nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.net.http_connections import HttpConnections

IDLE_S = 0.5
MOST = 3
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a server whose handler takes twice the deadline."""
    connections = HttpConnections(MOST, IDLE_S)

    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        with connections.busy(request.transport):
            return await handler(request)

    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(2 * IDLE_S)
        return web.Response(text="ok")

    app = web.Application(middlewares=[counted])
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    assert runner.server is not None
    make = connections.factory(runner.server)
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await runner.cleanup()


async def connect(port: int, sent: bytes = b"") -> Peer:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    await writer.drain()
    return reader, writer


async def is_closed(peer: Peer) -> bool:
    try:
        async with asyncio.timeout(30):
            return await peer[0].read(1) == b""
    except ConnectionError:
        return True
    finally:
        peer[1].close()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: local", b"\r\n"])
async def test_a_connection_without_a_request_is_closed(port: int, sent: bytes) -> None:
    assert await is_closed(await connect(port, sent))


async def test_a_request_that_takes_longer_than_the_deadline_is_answered(port: int) -> None:
    reader, writer = await connect(port, REQUEST)
    head = await reader.readuntil(b"ok")
    assert b"200 OK" in head
    # The deadline begins again behind the answer.
    assert await is_closed((reader, writer))


async def test_connections_beyond_the_bound_are_closed_at_once(port: int) -> None:
    busy = [await connect(port, REQUEST) for _ in range(MOST)]
    assert await is_closed(await connect(port, REQUEST))
    for reader, writer in busy:
        assert b"200 OK" in await reader.readuntil(b"ok")
        writer.close()
