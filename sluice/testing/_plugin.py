"""The pytest plugin: one server for each process of a test run, emptied for each test that uses `kafka`.

The one idea: a start takes a second, and a reset takes some milliseconds. So a server lives as long as the session.
Each pytest-xdist worker has a session of its own, and so a server of its own. The kernel chooses the server's port.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

import pytest

from sluice.testing._server import Kafka

MAX_NAME_CHARS = 100
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def kafka_settings() -> Mapping[str, str]:
    """Broker settings by Kafka's names; override this fixture to change them."""
    return {}


@pytest.fixture(scope="session")
def kafka_server(kafka_settings: Mapping[str, str]) -> Iterator[Kafka]:
    """The session's server, which keeps its topics and groups between tests."""
    with Kafka(kafka_settings) as server:
        yield server


@pytest.fixture(scope="session")
def kafka_bootstrap(kafka_server: Kafka) -> str:
    """HOST:PORT of the session's server."""
    return kafka_server.bootstrap


@pytest.fixture
def kafka(kafka_server: Kafka) -> Iterator[Kafka]:
    """The session's server, without topics, groups and faults from earlier tests."""
    kafka_server.reset()
    yield kafka_server
    kafka_server.heal()


@pytest.fixture
def kafka_topic(kafka_server: Kafka, request: pytest.FixtureRequest) -> str:
    """A new topic of one partition, named after the test."""
    if "kafka" in request.fixturenames:
        request.getfixturevalue("kafka")  # its reset would delete the topic
    name = re.sub(r"[^a-zA-Z0-9._-]+", "-", str(request.node.name))[:MAX_NAME_CHARS]
    return kafka_server.create_topic(f"{name}-{next(_numbers)}")
