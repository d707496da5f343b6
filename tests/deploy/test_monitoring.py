"""Prometheus and Grafana as the repository configures them: rules that fire, and queries that a real server answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Consumer, Producer

from tests.closing import close
from tests.gateway_process import ROOT, GatewayFactory, GatewayProcess, free_ports
from tests.steps.waiting import wait_for

PROMETHEUS, GRAFANA = ROOT / "deploy/prometheus", ROOT / "deploy/grafana"
DASHBOARD = GRAFANA / "dashboards/sluice.json"
READY_SECONDS = 120.0
UNUSUAL = frozenset(
    {
        "Refused clients",
        "Throttled clients",
        "Failed requests",
        "Refused batches",
        "Handoffs",
        "Ended transactions",
        "Failed background passes",
        "Requests with an error",
    }
)
"""Panels that are empty until something unusual happens, because their series have labels."""

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="Debian's package prometheus is not installed",
)


def queries() -> list[tuple[str, str]]:
    """Return title and expression of every query of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]


def test_the_dashboard_is_what_its_program_writes() -> None:
    written = subprocess.run(
        [sys.executable, str(GRAFANA / "dashboard.py")], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert DASHBOARD.read_text() == written


def test_the_dashboard_uses_only_documented_metrics() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    series = {f"{name}_bucket" if kind == "histogram" else name for name, kind in rows}
    assert len(queries()) > 30
    for title, expression in queries():
        used = set(re.findall(r"\b(?:sluice|kafka|process)_\w+", expression))
        assert used, title
        assert used <= series, title


def test_compose_mounts_what_prometheus_and_grafana_read() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    mounted = {
        target: ROOT / source
        for name in ("prometheus", "grafana")
        for source, target, *_ in (volume.split(":") for volume in services[name]["volumes"])
        if source.startswith("./")
    }
    assert all(path.is_dir() for path in mounted.values())
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/sluice.yml").read_text())["providers"][0]
    assert mounted[provider["options"]["path"]] == ROOT / "deploy/grafana/dashboards"
    source = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert urllib.parse.urlsplit(source["url"]).hostname in services
    (scraped,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    (found,) = scraped["dns_sd_configs"]
    assert set(found["names"]) == {name for name, service in services.items() if service["image"] == "sluice"}


@needs_prometheus
def test_each_alert_rule_fires_in_its_case_and_none_on_a_healthy_node() -> None:
    rules = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
    cases = yaml.safe_load((PROMETHEUS / "alerts.test.yml").read_text())["tests"]
    expected = [(test["alertname"], bool(test["exp_alerts"])) for case in cases for test in case["alert_rule_test"]]
    assert sorted(expected) == sorted((rule["alert"], fires) for rule in rules for fires in (True, False))
    done = subprocess.run(
        ["promtool", "test", "rules", str(PROMETHEUS / "alerts.test.yml")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


class Server:
    """A Prometheus server that scrapes one gateway."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.loads(answer.read())["data"]

    def is_ready(self) -> bool:
        try:
            return [target["health"] for target in self.get("targets")["activeTargets"]] == ["up"]
        except OSError:
            return False

    def result(self, expression: str) -> list[Any]:
        return self.get("query", query=expression)["result"]


@pytest.fixture
def served(gateway_factory: GatewayFactory) -> GatewayProcess:
    return gateway_factory()


@pytest.fixture
def server(served: GatewayProcess, tmp_path: Path) -> Iterator[Server]:
    """Run Prometheus with the repository's configuration, for another target and every second."""
    configuration = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = configuration["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [served.metrics_url.removeprefix("http://")]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    shutil.copy(PROMETHEUS / "alerts.yml", tmp_path)
    (port,) = free_ports(1)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={tmp_path / 'prometheus.yml'}"),
                *(f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
            ],
            env=os.environ,
            stdout=log,
            stderr=log,
        )
    try:
        yield Server(port)
    finally:
        process.terminate()
        process.wait(30)


@needs_prometheus
def test_a_real_prometheus_answers_every_query_of_the_dashboard(served: GatewayProcess, server: Server) -> None:
    wait_for(server.is_ready, "Prometheus does not read the gateway", seconds=READY_SECONDS)
    producer = Producer({"bootstrap.servers": served.bootstrap, "linger.ms": 0})
    reading = {"bootstrap.servers": served.bootstrap, "group.id": "watchers", "auto.offset.reset": "earliest"}
    consumer = Consumer(reading)
    missing: list[tuple[str, str]] = []

    def is_filled() -> bool:
        producer.produce("watched", b"record")
        assert producer.flush(30) == 0
        consumer.poll(1)
        usual = [query for query in queries() if query[0] not in UNUSUAL]
        missing[:] = [query for query in usual if not server.result(_given(query[1], served))]
        return not missing

    try:
        consumer.subscribe(["watched"])
        deadline = time.monotonic() + READY_SECONDS
        while not is_filled():
            assert time.monotonic() < deadline, missing
    finally:
        close(consumer)
    for _, expression in queries():
        server.result(_given(expression, served))
    rules = server.get("rules")["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert {rule["name"]: rule["state"] for rule in rules if rule["state"] != "inactive"} == {}


def _given(expression: str, gateway: GatewayProcess) -> str:
    """Fill in the dashboard's variables as Grafana does after a user has chosen node, topic and group."""
    node = gateway.metrics_url.removeprefix("http://")
    chosen = (("$instance", node), ("$topic", "watched"), ("$group", "watchers"), ("$__rate_interval", "1m"))
    for name, value in chosen:
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression
