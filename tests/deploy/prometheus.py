"""Prometheus with the repository's configuration, beside gateways of a test, and the queries of the dashboard."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.gateway_process import ROOT, GatewayProcess, free_ports

PROMETHEUS, GRAFANA = ROOT / "deploy/prometheus", ROOT / "deploy/grafana"
DASHBOARD = GRAFANA / "dashboards/sluice.json"
READY_SECONDS = 120.0

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="Debian's package prometheus is not installed",
)


def queries() -> list[tuple[str, str]]:
    """Return the title and the expression of every query of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]


class Server:
    """A Prometheus server that scrapes gateways."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.loads(answer.read())["data"]

    def is_ready(self) -> bool:
        try:
            health = [target["health"] for target in self.get("targets")["activeTargets"]]
        except OSError:
            return False
        return bool(health) and set(health) == {"up"}

    def result(self, expression: str) -> list[Any]:
        return self.get("query", query=expression)["result"]


@contextmanager
def prometheus(gateways: Sequence[GatewayProcess], directory: Path) -> Iterator[Server]:
    """Run Prometheus with the repository's configuration. It scrapes these gateways every second."""
    configuration = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    configuration["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = configuration["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [each.metrics_url.removeprefix("http://") for each in gateways]}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    shutil.copy(PROMETHEUS / "alerts.yml", directory)
    (port,) = free_ports(1)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={directory / 'prometheus.yml'}"),
                *(f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
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


def chosen(expression: str, gateway: GatewayProcess, topic: str, group: str) -> str:
    """Replace the dashboard's variables as Grafana does after a user has chosen a node, a topic and a group."""
    node = gateway.metrics_url.removeprefix("http://")
    variables = (("$instance", node), ("$topic", topic), ("$group", group), ("$__rate_interval", "1m"))
    for name, value in variables:
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression
