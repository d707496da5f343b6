"""kill −9 of the gateway, of Postgres, and Postgres gone for ten seconds, all under load."""

from __future__ import annotations

import threading

from tests.chaos.load import Load, assert_nothing_lost
from tests.clients.topics import create_topic
from tests.gateway_process import GatewayFactory

PARTITIONS = 4


def test_kill_9_of_the_gateway_loses_nothing_acknowledged(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory()
    topic = create_topic(gateway.bootstrap, PARTITIONS)
    load = Load(gateway.bootstrap, topic, PARTITIONS)
    load.start()
    for _ in range(3):
        load.wait_for(2000)
        gateway.kill()
        gateway.restart()
    load.wait_for(1000)
    load.stop()
    assert_nothing_lost(load)


def test_kill_9_of_the_embedded_postgres_loses_nothing_acknowledged(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory(embedded=True)
    topic = create_topic(gateway.bootstrap, PARTITIONS)
    load = Load(gateway.bootstrap, topic, PARTITIONS)
    load.start()
    for _ in range(2):
        load.wait_for(2000)
        gateway.kill_postgres()
    load.wait_for(1000)
    load.stop()
    assert_nothing_lost(load)


def test_postgres_gone_for_ten_seconds(gateway_factory: GatewayFactory) -> None:
    """Stopped (SIGSTOP), so that nothing answers, then back: producers wait, nothing acknowledged is lost."""
    gateway = gateway_factory(embedded=True)
    topic = create_topic(gateway.bootstrap, PARTITIONS)
    load = Load(gateway.bootstrap, topic, PARTITIONS)
    load.start()
    load.wait_for(2000)
    gateway.pause_postgres()
    outage = threading.Event()
    outage.wait(10)
    gateway.resume_postgres()
    load.wait_for(1000)
    load.stop()
    assert_nothing_lost(load)
