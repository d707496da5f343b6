"""Several gateways, each a process of its own, on one database."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping

import pytest

from gateway.cluster.leases import SHARDS
from tests.conftest import NO_SETTINGS, gateways
from tests.gateway_process import GatewayProcess
from tests.postgres import SERVED, Databases
from tests.steps.waiting import wait_for

BALANCED_S = 30.0
TTL_S = 2.5
QUICK_TTL = {"SLUICE_NODE_TTL_MS": str(int(TTL_S * 1000))}
"""Environment in which a node is lost sooner after it was killed."""

Cluster = Callable[..., list[GatewayProcess]]


@pytest.fixture
def database_url(postgres: Databases) -> Iterator[str]:
    """URL of a database that is the test's own, and that a node has served."""
    url = postgres.create(SERVED)
    yield url
    postgres.drop(url)


@pytest.fixture
def cluster(postgres: Databases, database_url: str) -> Iterator[Cluster]:
    """Start several gateways on the test's database, and wait until they share the shards."""
    with gateways(postgres) as factory:
        running: list[GatewayProcess] = []

        def start(count: int, *, environment: Mapping[str, str] = NO_SETTINGS, **settings: str) -> list[GatewayProcess]:
            """Start `count` more gateways and return them."""
            started = [factory(settings, database_url=database_url, environment=environment) for _ in range(count)]
            running.extend(started)
            balanced(running)
            return started

        yield start


def metric(node: GatewayProcess, name: str) -> float:
    """Return the value of one of the node's metrics, by name and labels; 0 if the node does not export it."""
    with urllib.request.urlopen(f"{node.metrics_url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def balanced(nodes: list[GatewayProcess]) -> list[int]:
    """Wait until the nodes hold equal shares of all shards, and return how many shards each holds."""
    return wait_for(
        lambda: [int(metric(node, "sluice_coordinator_leases")) for node in nodes],
        "all shards are held in even shares",
        holds=lambda held: sum(held) == SHARDS and max(held) - min(held) <= 1,
    )
