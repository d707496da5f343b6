"""Peers that open connections to an HTTP server and send no request."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.net.http_connections import HttpConnections
from tests.gateway.net.words import Accepted
from tests.secured import Authority

IDLE_S = 0.5
MOST = 3
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a server whose handler takes twice as long as the deadline."""
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


@pytest.fixture
async def tls_port(tmp_path: Path) -> AsyncIterator[int]:
    """The port of a TLS server. It allows one address one connection less than MOST."""
    connections = HttpConnections(MOST, most_from=MOST - 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Authority(tmp_path, "root").issue("/CN=localhost").whole)
    server = await connections.listen(asyncio.Protocol, "127.0.0.1", 0, 8, context)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def connect(port: int, sent: bytes = b"", address: str = "127.0.0.1") -> Peer:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
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
    # The deadline starts again after the answer.
    assert await is_closed((reader, writer))


async def test_connections_beyond_the_bound_are_closed_at_once(port: int) -> None:
    busy = [await connect(port, REQUEST) for _ in range(MOST)]
    assert await is_closed(await connect(port, REQUEST))
    for reader, writer in busy:
        assert b"200 OK" in await reader.readuntil(b"ok")
        writer.close()


async def test_handshakes_count_as_connections_of_the_server_and_of_their_address(tls_port: int) -> None:
    silent = [await connect(tls_port) for _ in range(MOST - 1)]
    assert await is_closed(await connect(tls_port)), "one more of this address"
    silent.append(await connect(tls_port, address="127.0.0.2"))
    assert await is_closed(await connect(tls_port, address="127.0.0.3")), "one more of the server"
    for _, writer in silent:
        writer.close()
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", tls_port, ssl=trusting)
                break
            except OSError:  # the server has not seen the end of the handshakes yet
                await asyncio.sleep(0.01)
    writer.close()


async def test_connections_from_an_ipv6_network_count_together() -> None:
    make = HttpConnections(MOST, most_from=1).factory(asyncio.Protocol)
    transports = [Accepted(address) for address in ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")]
    for transport in transports:
        make().connection_made(transport)
    assert [transport.is_aborted for transport in transports] == [False, True, False]
