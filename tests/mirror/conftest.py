"""Clusters for mirror tests: two clusters of gateways, and Apache Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import gateways
from tests.gateway_process import GatewayProcess
from tests.kafka.process import KafkaProcess, assemble
from tests.postgres import Databases

EAGER_CLEANER = {"log.cleaner.backoff.ms": "100", "log.segment.delete.delay.ms": "0"}


@pytest.fixture(scope="module")
def clusters(postgres: Databases) -> Iterator[tuple[GatewayProcess, GatewayProcess]]:
    """A source and a target cluster, each with a database of its own."""
    with gateways(postgres) as factory:
        yield factory(), factory()


@pytest.fixture
def source(clusters: tuple[GatewayProcess, GatewayProcess]) -> str:
    return clusters[0].bootstrap


@pytest.fixture
def target(clusters: tuple[GatewayProcess, GatewayProcess]) -> GatewayProcess:
    return clusters[1]


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an Apache Kafka node."""
    assemble()
    process = KafkaProcess(Path(tmp_path_factory.mktemp("kafka")), settings=EAGER_CLEANER)
    try:
        process.start()
        yield process.bootstrap
    finally:
        process.close()
