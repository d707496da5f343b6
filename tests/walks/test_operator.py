"""The operator's walk: two nodes on one Postgres, a dashboard with data, and an alert that fires when a node dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from tests.closing import close
from tests.deploy.prometheus import READY_SECONDS, Server, chosen, needs_prometheus, prometheus, queries
from tests.gateway_process import GatewayFactory
from tests.steps.waiting import wait_for

LIMIT_S = 290
ALERT_S = 150.0
"""Seconds until the alert. The rule waits for a minute, in which the node could return."""
ASKED = ("Lag", "Duration of commits", "CPU")
"""Panels that have data whenever clients work, from the table of questions in docs/monitoring.md."""
DOWN = "SluiceNodeDown"


def alerts(server: Server) -> dict[str, tuple[str, str]]:
    """Return the state and the instance of each alert that is not inactive."""
    listed: list[dict[str, Any]] = server.get("alerts")["alerts"]
    return {each["labels"]["alertname"]: (each["state"], each["labels"].get("instance", "")) for each in listed}


@pytest.mark.long
@needs_prometheus
@pytest.mark.timeout(LIMIT_S)
def test_the_dashboard_has_data_and_an_alert_names_a_dead_node(
    gateway_factory: GatewayFactory, database_url: str, tmp_path: Path
) -> None:
    nodes = [gateway_factory(database_url=database_url) for _ in range(2)]
    producer = Producer({"bootstrap.servers": nodes[0].bootstrap, "linger.ms": 0})
    reading = {"bootstrap.servers": nodes[0].bootstrap, "group.id": "watchers", "auto.offset.reset": "earliest"}
    consumer = Consumer(reading)
    panels = [(title, expression) for title, expression in queries() if title in ASKED]
    assert {title for title, _ in panels} == set(ASKED)
    with prometheus(nodes, tmp_path) as server:
        wait_for(server.is_ready, "Prometheus does not read the nodes", seconds=READY_SECONDS)

        def empty() -> list[str]:
            producer.produce("watched", b"record")
            assert producer.flush(60) == 0
            consumer.poll(0.5)
            shown = [(title, chosen(expression, nodes[0], "watched", "watchers")) for title, expression in panels]
            return [title for title, expression in shown if not server.result(expression)]

        try:
            consumer.subscribe(["watched"])
            wait_for(empty, "panels without data", holds=lambda titles: not titles, seconds=READY_SECONDS)
        finally:
            close(consumer)
        assert DOWN not in alerts(server)
        nodes[1].kill()
        address = nodes[1].metrics_url.removeprefix("http://")
        wait_for(
            lambda: alerts(server).get(DOWN),
            "the alert fires",
            holds=lambda alert: alert == ("firing", address),
            seconds=ALERT_S,
        )
        # The operator reads the alert's text "Look at the node" and starts the node again.
        nodes[1].restart()
        wait_for(lambda: DOWN not in alerts(server), "the alert is over", seconds=READY_SECONDS)
