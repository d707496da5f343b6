"""The operator's HTTP routes: /metrics, /livez, /readyz, /version.

The one idea: liveness says only that the event loop turns. Readiness names every check that fails, so that a probe's
log line is the diagnosis. Nothing here changes anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from gateway.net.http_connections import HttpConnections
from gateway.net.shared_read import SharedRead
from gateway.operate.metrics import Metrics
from gateway.version import program_version

CHECK_TIMEOUT_S = 2.0
STOP_TIMEOUT_S = 0.5
BACKLOG = 128
MAX_CONNECTIONS = 256
MAX_CONNECTIONS_FROM = 128
"""Maximal number of connections of one address, so that one address cannot keep probes and Prometheus out."""

_LINKS = (
    ("/metrics", "for Prometheus"),
    ("/livez", "whether the process answers"),
    ("/readyz", "whether clients are served, and why not"),
    ("/version", "the version of the program"),
)

Check = Callable[[], Awaitable[str | None]]
"""Returns the reason why the node is unhealthy, or None."""


class HttpServer:
    """Serve the operator's routes: `bind`, then `serve`, and `stop` at the end, even if an earlier call failed."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._snapshot: Callable[[], Awaitable[Collector]] | None = None
        self._checks: Mapping[str, Check] = {}
        self._bound: asyncio.Server | None = None
        self._checking: dict[str, asyncio.Future[str | None]] = {}
        self._connections = HttpConnections(MAX_CONNECTIONS, most_from=MAX_CONNECTIONS_FROM)
        app = web.Application(middlewares=[self._counted])
        app.add_routes(
            [
                web.get("/", self._get_links),
                web.get("/metrics", self._get_metrics),
                web.get("/livez", self._get_livez),
                web.get("/readyz", self._get_readyz),
                web.get("/version", self._get_version),
            ]
        )
        # aiohttp decompresses even the bodies that it ignores, on the event loop. No request here needs a body.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_TIMEOUT_S, auto_decompress=False)
        # A scraper that does not wait must not multiply the work, nor make others wait for all its scrapes.
        self._scrape = SharedRead(self._rendered)

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        with self._connections.busy(request.transport):
            return await handler(request)

    async def bind(self, host: str, port: int) -> None:
        """Take the address without listening on it yet. Raise OSError if that fails."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        make = self._connections.factory(server)
        self._bound = await asyncio.get_running_loop().create_server(
            make, host or None, port, reuse_address=True, backlog=BACKLOG, start_serving=False
        )

    async def serve(self, snapshot: Callable[[], Awaitable[Collector]], checks: Mapping[str, Check]) -> None:
        """Answer from here on. `checks` by name make up readiness, `snapshot` adds the cluster's metrics."""
        assert self._bound is not None
        self._snapshot, self._checks = snapshot, checks
        await self._bound.start_serving()

    async def stop(self) -> None:
        if self._bound is not None:
            self._bound.close()
        await self._runner.cleanup()

    async def _get_links(self, request: web.Request) -> web.Response:
        links = "".join(f'<li><a href="{path}">{path}</a>: {said}</li>' for path, said in _LINKS)
        page = f"<!doctype html><title>Sluice</title><h1>Sluice {program_version()}</h1><ul>{links}</ul>"
        return web.Response(text=page, content_type="text/html")

    async def _get_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=await self._scrape.get(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _rendered(self) -> bytes:
        assert self._snapshot is not None
        snapshot = await self._snapshot()
        # Rendering thousands of lines would block the event loop, and with it every heartbeat.
        return await asyncio.to_thread(_render, self._metrics.registry, snapshot)

    async def _get_livez(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _get_readyz(self, request: web.Request) -> web.Response:
        failures = await self.failing_checks()
        if failures:
            return web.Response(status=503, text="".join(f"{name}: {reason}\n" for name, reason in failures.items()))
        return web.Response(text="ok\n")

    async def _get_version(self, request: web.Request) -> web.Response:
        return web.json_response({"name": "sluice", "version": program_version()})

    async def failing_checks(self) -> dict[str, str]:
        """Return name and reason of every check that fails or takes too long."""
        # A late check is not cancelled, because asyncpg waits for an unresponsive Postgres even then. It is not started
        # a second time.
        for name, check in self._checks.items():
            if name not in self._checking:
                self._checking[name] = asyncio.ensure_future(check())
        checking = dict(self._checking)
        finished, _ = await asyncio.wait(checking.values(), timeout=CHECK_TIMEOUT_S)
        failures: dict[str, str] = {}
        for name, task in checking.items():
            if task in finished and self._checking.get(name) is task:
                del self._checking[name]
            reason = task.result() if task in finished else f"no answer in {CHECK_TIMEOUT_S} s"
            if reason is not None:
                failures[name] = reason
        return failures


def _render(*collectors: Collector) -> bytes:
    return b"".join(generate_latest(collector) for collector in collectors)
