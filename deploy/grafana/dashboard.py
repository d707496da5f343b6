"""Write Grafana's dashboard: `python deploy/grafana/dashboard.py > deploy/grafana/dashboards/sluice.json`.

The one idea: a panel is one line of a table here, because Grafana's JSON repeats the same hundred keys for each panel.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
NODE = 'instance=~"$instance"'
TOPIC = 'topic=~"$topic"'
GROUP = 'consumergroup=~"$group"'
RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """One panel: its title, its unit by Grafana's name, and its queries as pairs of expression and legend."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    help: str = ""
    kind: str = "timeseries"
    width: int = 8
    red_from: float | None = None
    """Value from which a number is shown in red."""


def quantile(share: str, metric: str, by: str, where: str = NODE) -> str:
    """Return the expression for a quantile of a histogram, grouped by `le` and these labels."""
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({metric}_bucket{{{where}}}{RATE})))"


def rate(metric: str, by: str, where: str = NODE) -> str:
    return f"sum by ({by}) (rate({metric}{{{where}}}{RATE}))"


WAITING = "FETCH|SHARE_FETCH|JOIN_GROUP|SYNC_GROUP"
"""APIs whose requests wait on purpose."""

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Cluster",
        (
            Panel("Live nodes", "short", (("max(kafka_brokers)", ""),), kind="stat", width=4),
            Panel(
                "Cluster is exported",
                "short",
                (("max(sluice_exporter_up)", ""),),
                "1 if a node could read the state of the cluster from Postgres.",
                "stat",
                4,
            ),
            Panel("Topics", "short", (("count(kafka_topic_partitions)", ""),), kind="stat", width=4),
            Panel(
                "Records per second",
                "short",
                ((f"sum(rate(kafka_topic_partition_current_offset{RATE}))", ""),),
                "",
                "stat",
                4,
            ),
            Panel("Stored records", "bytes", (("sum(sluice_topic_partition_size_bytes)", ""),), "", "stat", 4),
            Panel(
                "Damaged reads in 24 h",
                "short",
                (("sum(increase(sluice_damaged_chunks_total[24h]))", ""),),
                "Reads of missing or wrong bytes. Run: sluice check",
                "stat",
                4,
                1,
            ),
        ),
    ),
    (
        "Clients",
        (
            Panel("Requests", "reqps", ((rate("sluice_requests_total", "api"), "{{api}}"),)),
            Panel(
                "Slowest 1 % of requests",
                "s",
                ((quantile("0.99", "sluice_request_duration_seconds", "api", f'{NODE}, api!~"{WAITING}"'), "{{api}}"),),
                "Without the requests that wait on purpose.",
            ),
            Panel(
                "Requests with an error",
                "reqps",
                ((rate("sluice_requests_total", "api, error", f'{NODE}, error!="NONE"'), "{{api}} {{error}}"),),
            ),
            Panel(
                "Bytes from producers",
                "Bps",
                ((rate("sluice_topic_bytes_in_total", "topic", f"{NODE}, {TOPIC}"), "{{topic}}"),),
            ),
            Panel(
                "Bytes to consumers",
                "Bps",
                ((rate("sluice_topic_bytes_out_total", "topic", f"{NODE}, {TOPIC}"), "{{topic}}"),),
            ),
            Panel("Open connections", "short", ((f"sluice_connections{{{NODE}}}", "{{instance}}"),)),
            Panel(
                "Refused clients",
                "cps",
                (
                    (rate("sluice_protocol_errors_total", "reason"), "{{reason}}"),
                    (
                        rate("sluice_failed_authentication_total", "listener, mechanism"),
                        "login {{listener}} {{mechanism}}",
                    ),
                    (
                        rate("sluice_authorizer_denials_total", "resource, operation"),
                        "denied {{operation}} {{resource}}",
                    ),
                ),
            ),
            Panel(
                "Throttled clients",
                "s",
                ((rate("sluice_throttled_seconds_total", "quota"), "{{quota}}"),),
                "Seconds of throttling per second.",
            ),
            Panel(
                "Failed requests",
                "cps",
                (
                    (rate("sluice_storage_errors_total", "api"), "storage {{api}}"),
                    (rate("sluice_internal_errors_total", "api"), "defect {{api}}"),
                ),
                "Storage: check Postgres, its disk and the bucket. Defect: report the log lines.",
            ),
        ),
    ),
    (
        "Records",
        (
            Panel(
                "Duration of commits",
                "s",
                tuple(
                    (quantile(share, "sluice_commit_seconds", "instance"), f"{{{{instance}}}} p{share[2:]}")
                    for share in ("0.50", "0.99")
                ),
                "If it is high, run: sluice doctor",
            ),
            Panel("Durable batches", "ops", ((rate("sluice_committed_batches_total", "instance"), "{{instance}}"),)),
            Panel("Durable bytes", "Bps", ((rate("sluice_committed_bytes_total", "instance"), "{{instance}}"),)),
            Panel("Refused batches", "ops", ((rate("sluice_refused_batches_total", "error"), "{{error}}"),)),
            Panel(
                "Size of topics",
                "bytes",
                ((f"sum by (topic) (sluice_topic_partition_size_bytes{{{TOPIC}}})", "{{topic}}"),),
            ),
            Panel("Bytes held for clients", "bytes", ((f"sluice_held_bytes{{{NODE}}}", "{{instance}}"),)),
        ),
    ),
    (
        "Groups and transactions",
        (
            Panel(
                "Lag",
                "short",
                (
                    (
                        f"max by (consumergroup, topic) (kafka_consumergroup_lag_sum{{{GROUP}, {TOPIC}}})",
                        "{{consumergroup}} {{topic}}",
                    ),
                ),
            ),
            Panel(
                "Members",
                "short",
                (
                    (
                        f"max by (consumergroup) (kafka_consumergroup_members{{{GROUP}}})",
                        "{{consumergroup}}",
                    ),
                ),
            ),
            Panel(
                "Rebalances",
                "cps",
                ((rate("sluice_group_rebalances_total", "instance"), "{{instance}}"),),
                "Causes: sluice groups history GROUP",
            ),
            Panel(
                "Partitions that wait for their previous owner",
                "short",
                ((f"sluice_group_handoffs_pending{{{NODE}}}", "{{instance}}"),),
            ),
            Panel("Handoffs", "cps", ((rate("sluice_group_handoffs_total", "reason"), "{{reason}}"),)),
            Panel(
                "Rows that the journal lost",
                "ops",
                ((rate("sluice_journal_dropped_rows_total", "instance"), "{{instance}}"),),
            ),
            Panel(
                "Oldest open transaction",
                "s",
                (("max(sluice_open_transaction_age_seconds)", "age"),),
                "It blocks read-committed consumers. Run: sluice transactions list --open",
            ),
            Panel("Open transactions", "short", (("max(sluice_open_transactions)", "open"),)),
            Panel("Ended transactions", "ops", ((rate("sluice_transactions_ended_total", "outcome"), "{{outcome}}"),)),
        ),
    ),
    (
        "Nodes",
        (
            Panel(
                "CPU",
                "percentunit",
                ((f"rate(process_cpu_seconds_total{{{NODE}}}{RATE})", "{{instance}}"),),
                "100 % is one core, the most that a node can use.",
            ),
            Panel(
                "Delay of the event loop",
                "s",
                ((quantile("0.99", "sluice_event_loop_lag_seconds", "instance"), "{{instance}}"),),
            ),
            Panel("Resident memory", "bytes", ((f"process_resident_memory_bytes{{{NODE}}}", "{{instance}}"),)),
            Panel("Partitions led", "short", ((f"sluice_partitions_owned{{{NODE}}}", "{{instance}}"),)),
            Panel("Coordinator shards", "short", ((f"sluice_coordinator_leases{{{NODE}}}", "{{instance}}"),)),
            Panel("Changes not yet known", "short", ((f"sluice_reconcile_revision_lag{{{NODE}}}", "{{instance}}"),)),
            Panel(
                "Failed background passes",
                "cps",
                ((rate("sluice_background_failures_total", "instance, loop"), "{{instance}} {{loop}}"),),
            ),
            Panel(
                "Open files",
                "percentunit",
                ((f"process_open_fds{{{NODE}}} / process_max_fds{{{NODE}}}", "{{instance}}"),),
            ),
            Panel(
                "Versions",
                "short",
                (("sum by (version, python) (sluice_build_info)", "{{version}}, Python {{python}}"),),
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}
        )
        y, x = y + 1, 0
        for panel in row:
            height = 4 if panel.kind == "stat" else 8
            if x + panel.width > WIDTH:
                x, y = 0, y + height
            panels.append(_panel(panel, {"x": x, "y": y, "w": panel.width, "h": height}))
            x += panel.width
        y += 4 if row[-1].kind == "stat" else 8
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "title": "Sluice",
        "uid": "sluice",
        "tags": ["kafka"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                # All nodes, and not all programs that Prometheus scrapes: each has the metrics of a process.
                _variable("instance", "Node", "label_values(sluice_build_info, instance)", every=None),
                _variable("topic", "Topic", "label_values(kafka_topic_partitions, topic)"),
                _variable("group", "Group", "label_values(kafka_consumergroup_members, consumergroup)"),
            ]
        },
        "panels": panels,
    }


def _panel(panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.red_from is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.red_from}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            for number, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _variable(name: str, label: str, query: str, every: str | None = ".*") -> dict[str, Any]:
    """Return a variable of the dashboard. `every` is the pattern for all values; None: the values themselves."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": every,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


if __name__ == "__main__":
    json.dump(dashboard(), sys.stdout, indent=1)
    print()
