"""Nodes behind one address and port: a balancer leads each connection to the next node."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from protocol.errors import ErrorCode
from tests.cluster.balancer import Balancer
from tests.conftest import NO_SETTINGS, gateways
from tests.gateway_process import GatewayProcess, free_ports
from tests.postgres import Databases, LoopThread
from tests.steps.waiting import until

CLIENTS, NODES = "CLIENTS", "NODES"
AGAIN = frozenset(
    {
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.CONCURRENT_TRANSACTIONS,
    }
)
"""Codes at which every client tries again. On a busy machine nodes lose leases."""


async def tried(request: Callable[[], Awaitable[int | Collection[int]]]) -> int | Collection[int]:
    """Repeat a request as long as a code that it returns is one of `AGAIN`, and return its code or codes."""

    def holds(found: int | Collection[int]) -> bool:
        return AGAIN.isdisjoint((found,) if isinstance(found, int) else found)

    return await until(request, "no retriable code", holds=holds)


@dataclass(frozen=True)
class OneAddress:
    """Nodes and their address. `nodes[i].bootstrap` leads to the shared listener of one node, `inside[i]` to its own
    address."""

    address: str
    nodes: list[GatewayProcess]
    inside: list[str]
    balancer: Balancer


@contextlib.contextmanager
def one_address(
    postgres: Databases,
    database_url: str,
    count: int,
    settings: Mapping[str, str] = NO_SETTINGS,
    environment: Mapping[str, str] = NO_SETTINGS,
) -> Iterator[OneAddress]:
    """Run `count` nodes that share one address."""
    entrance, *ports = free_ports(1 + 2 * count)
    outside, inside = ports[:count], ports[count:]
    loop = LoopThread()
    try:
        balancer = Balancer(loop, {entrance: outside})
        with gateways(postgres) as factory:
            nodes = [
                factory(
                    {
                        "listeners": f"{CLIENTS}://127.0.0.1:{out},{NODES}://127.0.0.1:{own}",
                        "advertised.listeners": f"{CLIENTS}://127.0.0.1:{entrance},{NODES}://127.0.0.1:{own}",
                        "listener.security.protocol.map": f"{CLIENTS}:PLAINTEXT,{NODES}:PLAINTEXT",
                        "shared.listener.names": CLIENTS,
                        "inter.broker.listener.name": NODES,
                        **settings,
                    },
                    database_url=database_url,
                    environment=environment,
                )
                for out, own in zip(outside, inside, strict=True)
            ]
            yield OneAddress(f"127.0.0.1:{entrance}", nodes, [f"127.0.0.1:{port}" for port in inside], balancer)
    finally:
        loop.close()
