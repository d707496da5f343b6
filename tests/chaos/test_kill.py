"""kill −9 of the gateway, kill −9 of Postgres, and ten seconds without Postgres, all under load."""

from __future__ import annotations

import threading

import pytest

from tests.chaos.load import Load, assert_nothing_lost
from tests.clients.topics import create_topic
from tests.gateway_process import GatewayFactory
from tests.steps.seeds import first_always

PARTITIONS = 4


@pytest.mark.parametrize("kills", first_always([1, 3], 1))
def test_kill_9_of_the_gateway_loses_no_acknowledged_record(gateway_factory: GatewayFactory, kills: int) -> None:
    gateway = gateway_factory()
    topic = create_topic(gateway.bootstrap, PARTITIONS)
    load = Load(gateway.bootstrap, topic, PARTITIONS)
    load.start()
    for _ in range(kills):
        load.wait_for(2000)
        gateway.kill()
        gateway.restart()
    load.wait_for(1000)
    load.stop()
    assert_nothing_lost(load)


@pytest.mark.parametrize("kills", first_always([1, 2], 1))
def test_kill_9_of_the_embedded_postgres_loses_no_acknowledged_record(
    gateway_factory: GatewayFactory, kills: int
) -> None:
    gateway = gateway_factory(embedded=True)
    topic = create_topic(gateway.bootstrap, PARTITIONS)
    load = Load(gateway.bootstrap, topic, PARTITIONS)
    load.start()
    for _ in range(kills):
        load.wait_for(2000)
        gateway.kill_postgres()
    load.wait_for(1000)
    load.stop()
    assert_nothing_lost(load)


@pytest.mark.parametrize("seconds", first_always([2, 10], 1))
def test_a_stopped_postgres_loses_no_acknowledged_record(gateway_factory: GatewayFactory, seconds: int) -> None:
    """Postgres is stopped (SIGSTOP), so it does not answer, and then continues. Producers wait, and no acknowledged
    record is lost."""
    gateway = gateway_factory(embedded=True)
    topic = create_topic(gateway.bootstrap, PARTITIONS)
    load = Load(gateway.bootstrap, topic, PARTITIONS)
    load.start()
    load.wait_for(2000)
    gateway.pause_postgres()
    outage = threading.Event()
    outage.wait(seconds)
    gateway.resume_postgres()
    load.wait_for(1000)
    load.stop()
    assert_nothing_lost(load)
