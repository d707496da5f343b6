"""Which node exports the metrics of the cluster, and which node takes over when it dies."""

from __future__ import annotations

import re
import urllib.request

from tests.clients.topics import create_topic
from tests.cluster.conftest import QUICK_TTL, Cluster
from tests.gateway_process import GatewayProcess
from tests.steps.waiting import wait_for

FAILOVER_S = 30.0
"""In seconds; far longer than a lease and a pass, because the test does not measure time."""


def exported(node: GatewayProcess) -> list[str]:
    with urllib.request.urlopen(f"{node.metrics_url}/metrics", timeout=10) as answer:
        return re.findall(r"^kafka_topic_partitions\{.*$", answer.read().decode(), re.MULTILINE)


def exporter_among(nodes: list[GatewayProcess], topic: str) -> GatewayProcess:
    """Wait until one of the nodes exports the topic. At no time may two nodes export it."""

    def exporter() -> GatewayProcess | None:
        found = [node for node in nodes if exported(node)]
        assert len(found) <= 1, [node.bootstrap for node in found]
        exports = found and f'kafka_topic_partitions{{topic="{topic}"}} 3.0' in exported(found[0])
        return found[0] if exports else None

    found = wait_for(exporter, "a node exports the cluster's metrics", seconds=FAILOVER_S)
    assert found is not None
    return found


def test_another_node_exports_the_metrics_when_the_exporter_dies(cluster: Cluster) -> None:
    nodes = cluster(2, environment=QUICK_TTL)
    topic = create_topic(nodes[0].bootstrap, 3)
    first = exporter_among(nodes, topic)
    first.kill()
    (other,) = [node for node in nodes if node is not first]
    assert exporter_among([other], topic) is other
