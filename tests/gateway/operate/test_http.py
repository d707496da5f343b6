"""The operator's routes under load."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import socket
import time
from contextlib import ExitStack
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from gateway.operate.http import MAX_CONNECTIONS, HttpServer
from gateway.operate.logs import LINES_PER_EVENT
from gateway.operate.metrics import Metrics
from tests.gateway_process import GatewayProcess, free_ports


def test_one_address_leaves_connections_to_the_probes_of_others(gateway: GatewayProcess) -> None:
    """Kubernetes restarts a node whose /livez does not answer."""
    place = urlsplit(gateway.metrics_url)
    assert place.hostname is not None
    assert place.port is not None
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection((place.hostname, place.port)))
        probe = http.client.HTTPConnection(place.hostname, place.port, timeout=10, source_address=("127.0.0.2", 0))
        probe.request("GET", "/livez")
        assert probe.getresponse().status == 200
        probe.close()


def test_malformed_requests_do_not_fill_the_log(gateway: GatewayProcess) -> None:
    place = urlsplit(gateway.metrics_url)
    for _ in range(2 * LINES_PER_EVENT):
        with socket.create_connection((place.hostname or "", place.port or 0), timeout=10) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
            assert stranger.recv(100).startswith(b"HTTP/1.0 400")
    assert 0 < gateway.log_text().count("Error handling request") <= LINES_PER_EVENT


async def test_clients_that_ask_at_once_share_a_scrape() -> None:
    """A client that asks often, and perhaps leaves at once, must not make Prometheus wait."""
    (port,) = free_ports(1)
    released = asyncio.Event()
    scrapes = 0

    async def snapshot() -> Collector:
        nonlocal scrapes
        scrapes += 1
        await released.wait()
        return CollectorRegistry()

    async def ask(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        return reader, writer

    server = HttpServer(Metrics())
    await server.bind("127.0.0.1", port)
    await server.serve(snapshot, {})
    try:
        asking = [await ask("/metrics") for _ in range(40)]
        for _, writer in asking[:20]:
            writer.close()
        await (await ask("/livez"))[0].read()  # By now the server has read all requests.
        released.set()
        for reader, writer in asking[20:]:
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
        assert scrapes == 2
    finally:
        await server.stop()


async def test_compressed_body_of_a_stranger_is_not_decompressed() -> None:
    """Two megabytes decompress to two gigabytes. That takes the event loop's time, although no handler reads them."""
    (port,) = free_ports(1)
    server = HttpServer(Metrics())
    await server.bind("127.0.0.1", port)

    async def snapshot() -> Collector:
        return CollectorRegistry()

    await server.serve(snapshot, {})
    body = gzip.compress(bytes(64 * 2**20)) * 32
    head = f"POST /livez HTTP/1.1\r\nHost: h\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        began_s = time.thread_time()
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        assert (await reader.read()).startswith(b"HTTP/1.1 405")
        assert time.thread_time() - began_s < 0.5
    finally:
        writer.close()
        await server.stop()
