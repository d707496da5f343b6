"""Two clusters: a source and a target."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import gateways
from tests.gateway_process import GatewayProcess
from tests.postgres import Databases


@pytest.fixture(scope="module")
def clusters(postgres: Databases) -> Iterator[tuple[GatewayProcess, GatewayProcess]]:
    """A source and a target, each with a database of its own."""
    with gateways(postgres) as factory:
        yield factory(), factory()


@pytest.fixture
def source(clusters: tuple[GatewayProcess, GatewayProcess]) -> str:
    return clusters[0].bootstrap


@pytest.fixture
def target(clusters: tuple[GatewayProcess, GatewayProcess]) -> GatewayProcess:
    return clusters[1]
