"""A real S3 server for all tests of this folder, and a bucket's prefix for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from storage.object_store import ObjectStore
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.objects.s3_server import BUCKET, PROGRAMS, S3Server, missing
from tests.postgres import short_directory
from tests.storage.conftest import database, key, make_topic, sql, topics  # noqa: F401

SERVER = os.environ.get("SLUICE_TEST_S3_SERVER", next(iter(PROGRAMS)))


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """Skip all tests of this folder if no server can be built, and show the reason."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with short_directory() as directory:
        server = S3Server(SERVER, directory)
        server.start()
        yield server
        server.kill()


@pytest.fixture
def url() -> str:
    """A bucket prefix for this test alone."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex[:12]}"


MakeStore = Callable[[str], ObjectStore]


@pytest.fixture
def make_store(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    made: list[ObjectStore] = []

    def make(url: str) -> ObjectStore:
        made.append(ObjectStore.at(url))
        return made[-1]

    yield make
    for store in made:
        store.close()


class StartGateway(Protocol):
    def __call__(self, url: str, *, shared: str | None = None, port: int | None = None) -> GatewayProcess:
        """Start a gateway with this store. It moves records to the store a moment after they were written. `shared` is
        a database that other gateways use too. `port` is the port of a proxy to the server.
        """
        ...


EAGER = {"log.store.roll.ms": "100", "log.retention.check.interval.ms": "500"}


@pytest.fixture
def start_gateway(s3: S3Server, gateway_factory: GatewayFactory) -> StartGateway:
    def start(url: str, *, shared: str | None = None, port: int | None = None) -> GatewayProcess:
        environment = {"SLUICE_LOG_STORE": url, **s3.environment(port)}
        return gateway_factory(EAGER, database_url=shared, environment=environment)

    return start
