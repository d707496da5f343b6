"""Brokers with one rack each. They redirect consumers to the replica in the consumer's rack, for tests of KIP-392."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.compat.brokers import APACHE_KAFKA, BrokerProcess, GatewayNodes
from tests.kafka.process import KafkaProcess
from tests.postgres import short_directory

BROKERS = 3


def settings_of(number: int) -> dict[str, str]:
    """Return the settings of the broker with this number, from 1."""
    return {
        "node.id": str(number),
        "broker.rack": f"RACK{number}",
        "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
    }


@contextlib.contextmanager
def racked(settings: Mapping[str, str], *, kafka: bool) -> Iterator[str]:
    """Run BROKERS brokers, in RACK1 and so on, and yield the address of the first one."""
    with contextlib.ExitStack() as stack:

        def started(node: BrokerProcess) -> BrokerProcess:
            stack.callback(node.close)
            node.start()
            return node

        def directory() -> Path:
            return stack.enter_context(short_directory())

        if not kafka:
            yield started(GatewayNodes(directory(), settings, BROKERS, settings_of)).bootstrap
            return
        APACHE_KAFKA.version()  # This downloads Kafka's jars.
        controller = KafkaProcess(directory(), settings={}, role="controller")
        started(controller)
        brokers = [
            started(KafkaProcess(directory(), settings={**settings, **settings_of(number)}, of=controller))
            for number in range(1, BROKERS + 1)
        ]
        yield brokers[0].bootstrap
