"""docs/metrics.md lists the metrics of a running node, and the alert rules use no others."""

from __future__ import annotations

import re
import time
import urllib.request

import pytest

from tests.gateway_process import ROOT, GatewayProcess

PAGE = ROOT / "docs" / "metrics.md"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"


@pytest.fixture(scope="module")
def page(gateway: GatewayProcess) -> str:
    """The metrics of a running node after its first read of the cluster."""
    deadline_s = time.monotonic() + 30
    text = ""
    while "sluice_open_transactions " not in text:
        assert time.monotonic() < deadline_s, text
        with urllib.request.urlopen(f"{gateway.metrics_url}/metrics", timeout=10) as response:
            text = response.read().decode()
    return text


@pytest.fixture(scope="module")
def exported(page: str) -> dict[str, str]:
    """Type of each metric by its name."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))


def test_the_page_lists_each_metric_with_its_type(exported: dict[str, str]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == exported
    assert len(rows) == len(exported)


def test_alert_rules_use_exported_metrics(exported: dict[str, str]) -> None:
    series = set(exported)
    series |= {f"{name}_bucket" for name, kind in exported.items() if kind == "histogram"}
    expressions = re.findall(r"^ +expr: (.+)$", ALERTS.read_text(), re.MULTILINE)
    assert len(expressions) == ALERTS.read_text().count("- alert: ") > 0
    for expression in expressions:
        if expression.startswith("up{"):
            continue  # Prometheus' own metric: whether a node could be scraped
        used = set(re.findall(r"\b(?:sluice|kafka|process)_\w+", expression))
        assert used, expression
        assert used <= series, expression


def test_counters_of_alert_rules_begin_at_zero(page: str) -> None:
    """`increase` misses the first value of a series, so a series that begins with the first error gives no alert."""
    counters = set(re.findall(r"(?:increase|rate)\((\w+_total)", ALERTS.read_text()))
    assert len(counters) >= 5
    samples = re.findall(r"^(\w+)(?:\{.*\})? (?:0\.0|0)$", page, re.MULTILINE)
    assert counters <= set(samples)
