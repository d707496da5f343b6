"""Prometheus metrics of an archive job."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

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
    """Figures, shown on `port` if there is one."""
    figures = Figures()
    if port is not None:
        start_http_server(port, host, figures.registry)
    return figures
