"""A gateway with the SQL door (the functions by which SQL transactions produce and commit), and connections of ordinary
SQL clients.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.gateway_process import GatewayProcess


@pytest.fixture
async def sql(gateway: GatewayProcess) -> AsyncIterator[asyncpg.Connection]:
    """A SQL client's connection to the database of the module's gateway."""
    assert gateway.database_url is not None
    connection = await asyncpg.connect(gateway.database_url)
    yield connection
    await connection.close()


@pytest.fixture
async def other(gateway: GatewayProcess) -> AsyncIterator[asyncpg.Connection]:
    """Another SQL client's connection."""
    assert gateway.database_url is not None
    connection = await asyncpg.connect(gateway.database_url)
    yield connection
    await connection.close()


@pytest.fixture
def topic(gateway: GatewayProcess, request: pytest.FixtureRequest) -> str:
    """A new topic with three partitions."""
    name = re.sub("[^a-zA-Z0-9_-]+", "-", request.node.name)[:200].strip("-")
    create_topic(gateway, name, 3)
    return name


def create_topic(gateway: GatewayProcess, name: str, partitions: int, **config: str) -> None:
    """Create a topic; `config` has underscores in place of dots."""
    admin = AdminClient({"bootstrap.servers": gateway.bootstrap})
    named = {key.replace("_", "."): value for key, value in config.items()}
    admin.create_topics([NewTopic(name, partitions, 1, config=named)])[name].result(10)


@pytest.fixture
def consumer(gateway: GatewayProcess) -> Iterator[Consumer]:
    """A stock consumer that reads from the beginning."""
    made = Consumer(
        {
            "bootstrap.servers": gateway.bootstrap,
            "group.id": "sql-test",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 500,
        }
    )
    yield made
    made.close()


@pytest.fixture
def producer(gateway: GatewayProcess) -> Producer:
    """A stock idempotent producer that places by Java's murmur2."""
    return Producer(
        {"bootstrap.servers": gateway.bootstrap, "enable.idempotence": True, "partitioner": "murmur2_random"}
    )
