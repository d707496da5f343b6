"""The traces of a node, if it has a collector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.building.undo import STEP_TIMEOUT_S, Undo
from gateway.config.settings import Settings
from gateway.operate.metrics import Metrics
from gateway.version import program_version

if TYPE_CHECKING:
    from gateway.tracing.traces import Traces


def build_traces(settings: Settings, node: str, metrics: Metrics, undo: Undo) -> Traces | None:
    """Make the traces; None: no collector is set. `node` is the address that names the node."""
    if settings.otlp_endpoint is None:
        return None
    # A node without a collector does not load the HTTP client.
    from gateway.tracing.exporter import Exporter
    from gateway.tracing.traces import Traces

    version = program_version()
    resource = (("service.name", "sluice"), ("service.version", version), ("service.instance.id", node))
    headers = dict(settings.otlp_headers or ())
    exporter = Exporter(settings.otlp_endpoint, headers, resource, version, metrics.trace_spans_dropped.inc)
    undo.push("traces", STEP_TIMEOUT_S, exporter.close)
    return Traces(exporter, settings.otlp_sample)
