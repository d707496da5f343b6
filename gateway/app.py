"""The whole node: listeners first, then the database and every other part; stopped in reverse.

The one idea: a start does what can be refused before it creates anything, and imports while it waits. The ports are
bound first. Then `gateway/node.py`, which knows all parts, is imported in a thread while Postgres starts. Stopping
keeps one promise: every answered request is durable, every request in work is answered if `drain_ms` allows, and the
node's leases are free at once for the next process.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from gateway.building.database import open_database
from gateway.building.listeners import bind_http, bind_listeners
from gateway.building.traces import build_traces
from gateway.building.undo import StartError, Undo
from gateway.config.definition import ConfigError
from gateway.config.listeners import render_address
from gateway.config.settings import Settings
from gateway.operate.audit_log import AuditLog
from gateway.operate.metrics import Metrics
from gateway.operate.supervisor import Supervisor
from storage.embedded import EmbeddedPostgresError
from storage.errors import StorageError

if TYPE_CHECKING:
    from gateway.groups.groups import Groups
    from gateway.node import Node, StagesWithFaults

__all__ = ["App", "StartError"]

logger = structlog.get_logger(__name__)

THREAD_SWITCH_S = 0.0005
"""How long a working thread (validation, compaction) keeps the interpreter from the event loop, which must request
it again after every call into the kernel. Python's own 5 ms would cost a busy loop most of its time."""


class App:
    """One node. Call `start` once and `stop` once, both on the same event loop."""

    def __init__(self, settings: Settings, faults: StagesWithFaults | None = None) -> None:
        """Take the settings and, in a node that a test starts, the faults of its requests."""
        self.settings = settings
        self._faults = faults
        self.metrics = Metrics(settings.metrics_max_series)
        self.bootstrap = ""
        """Address to which clients connect, once started."""
        self.addresses: Mapping[str, str] = {}
        """Addresses to which clients connect, by listener."""
        self.groups: Groups | None = None
        """The groups of a node that serves."""
        self.console_url = ""
        """URL of the console, once it has started. Empty if there is no console."""
        self._supervisor = Supervisor(self.metrics)
        self._undo = Undo()

    async def start(self) -> None:
        """Start the node; return once it serves clients. Raise StartError; `stop` must be called either way."""
        started = time.monotonic()
        try:
            await self._start()
        except (StorageError, EmbeddedPostgresError, ConfigError) as error:
            raise StartError(str(error)) from error
        logger.info("serving", bootstrap=self.bootstrap, took_ms=round((time.monotonic() - started) * 1000))

    async def stop(self) -> None:
        """Drain and release everything, even if `start` did not complete. If a step fails, the
        other steps still run.
        """
        await self._undo.run()

    # --- starting -------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        settings, metrics, undo = self.settings, self.metrics, self._undo
        sys.setswitchinterval(THREAD_SWITCH_S)
        audit_log = None if settings.audit_log is None else AuditLog(settings.audit_log, metrics)
        listeners = await bind_listeners(settings, metrics, undo)
        http = await bind_http(settings, metrics, undo)
        traces = build_traces(settings, render_address(next(iter(listeners.advertised.values()))), metrics, undo)
        importing = asyncio.create_task(asyncio.to_thread(_import_node))
        try:
            opened = await open_database(settings, undo)
        finally:
            await asyncio.wait((importing,))
        node = (await importing)(settings, metrics, self._supervisor, undo, self._faults)
        serving = await node.serve(listeners, http, opened, audit_log, traces)
        self.groups, self.bootstrap = serving.groups, serving.bootstrap
        self.addresses, self.console_url = serving.addresses, serving.console_url


def _import_node() -> type[Node]:
    from gateway.node import Node

    return Node
