"""The sockets of a TLS listener."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import cast

import pytest

from gateway.net import tls_listener
from gateway.net.tls_listener import TlsListener, bind_sockets
from tests.secured import Authority


class Greeting(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(b"hello")


class Log:
    def __init__(self) -> None:
        self.told = asyncio.Event()

    def error(self, event: str, **more: object) -> None:
        self.told.set()


async def test_a_listener_accepts_again_after_any_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    monkeypatch.setattr(tls_listener, "logger", log)
    issued = Authority(tmp_path, "root").issue("/CN=localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.whole)
    (listening,) = await bind_sockets("127.0.0.1", 0, 8)
    listener = TlsListener([listening], context, Greeting, lambda host: None, lambda host: None)
    await listener.start_serving()
    try:
        listening.shutdown(socket.SHUT_RDWR)  # accept() fails with EINVAL until the socket listens again
        async with asyncio.timeout(20):
            await log.told.wait()
        listening.listen(8)
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", listening.getsockname()[1], ssl=trusting)
            assert await reader.readexactly(5) == b"hello"
        writer.close()
    finally:
        listener.close()
