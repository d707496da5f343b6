"""Prometheus and Grafana with the repository's configuration: rules that fire, and queries that a
real server answers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from confluent_kafka import Consumer, Producer
from prometheus_client import generate_latest

from gateway.operate.metrics import Metrics
from tests.closing import close
from tests.deploy.prometheus import (
    DASHBOARD,
    GRAFANA,
    PROMETHEUS,
    READY_SECONDS,
    Server,
    chosen,
    needs_prometheus,
    prometheus,
    queries,
)
from tests.gateway_process import ROOT, GatewayFactory, GatewayProcess
from tests.steps.waiting import wait_for

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
"""Panels without data until something unusual happens, because their series have labels."""


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


def test_choice_of_all_nodes_matches_no_other_program() -> None:
    variables = {each["name"]: each for each in json.loads(DASHBOARD.read_text())["templating"]["list"]}
    assert variables["instance"]["allValue"] is None
    assert "sluice_build_info" in variables["instance"]["definition"]


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


def test_threshold_of_a_quantile_is_a_bucket_of_its_histogram() -> None:
    """Prometheus guesses a quantile within a bucket, so a rule could fire far below its threshold."""
    exported = generate_latest(Metrics().registry).decode()
    rules = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
    found = [re.search(r"rate\((\w+_bucket)\[.* > ([\d.]+)$", rule["expr"]) for rule in rules]
    thresholds = [each.groups() for each in found if each is not None]
    assert len(thresholds) == 2
    for name, threshold in thresholds:
        assert f'{name}{{le="{threshold}"}}' in exported


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


@needs_prometheus
def test_alert_fires_if_discovery_finds_no_node(tmp_path: Path) -> None:
    """A node that does not run may be no target (prometheus.yml), so no series says that it is down."""
    summary = 'No node could read the cluster\'s state for two minutes. Check Postgres, then run "sluice doctor".'
    alerts = [{"exp_labels": {"severity": "critical"}, "exp_annotations": {"summary": summary}}]
    case = {"interval": "1m", "input_series": [{"series": "up", "values": "1x5"}]}
    case["alert_rule_test"] = [{"alertname": "SluiceClusterNotExported", "eval_time": "5m", "exp_alerts": alerts}]
    path = tmp_path / "no-node.test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(PROMETHEUS / "alerts.yml")], "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def served(gateway_factory: GatewayFactory) -> GatewayProcess:
    return gateway_factory()


@pytest.fixture
def server(served: GatewayProcess, tmp_path: Path) -> Iterator[Server]:
    with prometheus([served], tmp_path) as made:
        yield made


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
        missing[:] = [query for query in usual if not server.result(chosen(query[1], served, "watched", "watchers"))]
        return not missing

    try:
        consumer.subscribe(["watched"])
        deadline = time.monotonic() + READY_SECONDS
        while not is_filled():
            assert time.monotonic() < deadline, missing
    finally:
        close(consumer)
    for _, expression in queries():
        server.result(chosen(expression, served, "watched", "watchers"))
    rules = server.get("rules")["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert {rule["name"]: rule["state"] for rule in rules if rule["state"] != "inactive"} == {}
