"""The listening sockets of a node. They are bound before all other parts start, and served after all of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.building.undo import STEP_TIMEOUT_S, StartError, Undo
from gateway.cluster.reachability import warn_of_unreachable
from gateway.config.broker import BrokerConfig
from gateway.config.broker_clients import ip_overrides
from gateway.config.listeners import Listener, render_address
from gateway.config.security import listener_security
from gateway.config.settings import Settings
from gateway.log.catalog import Catalog
from gateway.net.connection import ConnectionLimits
from gateway.net.requests import Requests
from gateway.net.server import Server, Tls
from gateway.operate.metrics import Metrics
from gateway.security.authenticator import ListenerSasl, Users
from gateway.security.failures import Failures
from gateway.security.tls import Certificates, identify_by, make_context
from storage.types import Address

if TYPE_CHECKING:
    from gateway.operate.http import HttpServer


@dataclass(frozen=True, slots=True)
class Listeners:
    """The bound sockets."""

    server: Server
    advertised: Mapping[str, Address]
    """Address to which clients connect, by listener."""
    certificates: Certificates


async def bind_listeners(settings: Settings, metrics: Metrics, undo: Undo) -> Listeners:
    """Bind the ports, without listening yet. So a taken port is found before anything is created or the node joins, and
    a port that the kernel chose is known when the node joins. Raise StartError, ConfigError."""
    broker = settings.broker
    server = Server(
        metrics,
        ConnectionLimits(
            max_request_bytes=broker.socket_request_max_bytes,
            max_idle_ms=broker.connections_max_idle_ms,
            max_connections=broker.max_connections,
        ),
    )
    undo.push("listeners", 2 * STEP_TIMEOUT_S, server.close)
    certificates = Certificates()
    advertised = {
        listener.name: await _bind(
            server, listener, await asyncio.to_thread(_tls, listener, broker, certificates, metrics)
        )
        for listener in settings.listeners
    }
    return Listeners(server, advertised, certificates)


async def bind_http(settings: Settings, metrics: Metrics, undo: Undo) -> HttpServer | None:
    """Bind the port of metrics and health; None: no such port is set. Raise StartError."""
    if settings.metrics_listen is None:
        return None
    # The packages of the metrics page take a tenth of the time of all imports. A node without metrics does not need
    # them.
    from gateway.operate.http import HttpServer

    host, port = settings.metrics_listen
    http = HttpServer(metrics)
    undo.push("http", 2 * STEP_TIMEOUT_S, http.stop)
    try:
        await http.bind(host, port)
    except OSError as error:
        raise StartError(f"cannot serve metrics on {host}:{port} (see --metrics-listen): {_reason(error)}") from error
    return http


def build_sasl(
    settings: Settings, requests: Mapping[str, Requests], known: Users, metrics: Metrics, undo: Undo
) -> dict[str, ListenerSasl]:
    """Return the SASL state of the listeners whose clients use SASL; `requests` are their handlers."""
    broker = settings.broker
    delay_ms = broker.connection_failed_authentication_delay_ms
    made: dict[str, ListenerSasl] = {}
    for listener in settings.listeners:
        sasl = listener_security(listener, broker).sasl
        if sasl is not None:
            made[listener.name] = ListenerSasl(
                listener.name, sasl, known, requests[listener.name], metrics, failure_delay_ms=delay_ms
            )
            undo.push(f"tokens of {listener.name}", STEP_TIMEOUT_S, made[listener.name].close)
    return made


def connections_from(catalog: Catalog) -> Callable[[str], int]:
    """Return the limit on connections per address, according to the current settings."""

    def most_from(address: str) -> int:
        overrides = catalog.broker.max_connections_per_ip_overrides
        most = catalog.broker.max_connections_per_ip
        return ip_overrides(overrides).get(address, most) if overrides else most

    return most_from


def look_for_itself(advertised: Mapping[str, Address], undo: Undo) -> None:
    """Warn of advertised addresses that cannot be reached."""
    looking = asyncio.create_task(warn_of_unreachable(advertised))

    async def stop() -> None:
        looking.cancel()
        await asyncio.wait((looking,))

    undo.push("look at addresses", STEP_TIMEOUT_S, stop)


def _tls(listener: Listener, broker: BrokerConfig, certificates: Certificates, metrics: Metrics) -> Tls | None:
    """Read the listener's certificates. Raise ConfigError if they cannot be used."""
    security = listener_security(listener, broker)
    if security.tls is None:
        return None
    failures = Failures("a TLS handshake failed", listener=listener.name)

    def failed(reason: str) -> None:
        metrics.protocol_errors.labels("tls_handshake").inc()
        failures.log(reason=reason)

    identify = None if security.sasl is not None else identify_by(security.tls)
    context = make_context(security.tls, failed)
    certificates.add(listener, context, security.tls)
    return Tls(context, identify)


async def _bind(server: Server, listener: Listener, tls: Tls | None) -> Address:
    """Bind the listener and return the address to which its clients connect. Raise StartError if binding fails."""
    host, port = listener.bind
    try:
        bound_port = await server.bind(host, port, listener.name, tls)
    except OSError as error:
        raise StartError(
            f"cannot listen on {render_address(listener.bind)} (see --listen): {_reason(error)}"
        ) from error
    advertised_host, advertised_port = listener.advertised
    return advertised_host, advertised_port or bound_port


def _reason(error: OSError) -> str:
    """Return the error in the system's words: asyncio's repeat the address, and an unresolvable name has no errno."""
    code = error.errno or 0
    return os.strerror(code) if code > 0 else error.strerror or str(error)
