"""Prometheus metrics of an archive job."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from pipeline.errors import PipelineError

MAX_PARTITIONS_SHOWN = 10_000


class Figures:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._records = Counter("sluice_archive_records", "Records committed by this run.", registry=self.registry)
        self._batches = Counter("sluice_archive_batches", "Batches committed by this run.", registry=self.registry)
        self._seconds = Gauge("sluice_archive_batch_seconds", "How long the last batch took.", registry=self.registry)
        self._lag = Gauge(
            "sluice_archive_lag_records",
            "Offsets of the partition that are not archived yet.",
            ("topic", "partition"),
            registry=self.registry,
        )
        self._shown: set[tuple[str, int]] = set()

    def batch(self, rows: int, seconds: float) -> None:
        self._records.inc(rows)
        if seconds:
            self._batches.inc()
            self._seconds.set(seconds)

    def lag(self, topic: str, partition: int, records: int) -> None:
        key = (topic, partition)
        if key in self._shown or len(self._shown) < MAX_PARTITIONS_SHOWN:
            self._shown.add(key)
            self._lag.labels(topic, partition).set(records)


def serve(host: str, port: int | None) -> Figures:
    """Return new figures, and serve them on `port` unless it is None. Raise PipelineError if the
    port cannot be used.
    """
    figures = Figures()
    if port is not None:
        try:
            start_http_server(port, host, figures.registry)
        except (OSError, OverflowError) as error:
            raise PipelineError(
                f"The metrics cannot be served on {host}:{port} ({error}).",
                "Name a free port with --metrics-port, and an address of this machine with --metrics-host.",
            ) from error
    return figures
