"""Metrics that are counted without prometheus_client's own counters, as a scrape reads them."""

from __future__ import annotations

import threading

from gateway.operate.metrics import Metrics


def test_commits_are_counted_with_what_they_carry() -> None:
    metrics = Metrics()
    for batches, size_bytes, duration_s in ((1, 100, 0.0005), (3, 900, 0.0006), (2, 50, 99.0)):
        metrics.observe_commit(batches, size_bytes, duration_s)
    sample = metrics.registry.get_sample_value
    assert [sample("sluice_commit_seconds_bucket", {"le": bound}) for bound in ("0.0005", "0.001", "10.0", "+Inf")] == [
        1,
        2,
        2,
        3,
    ]
    assert sample("sluice_commit_seconds_count") == 3
    assert sample("sluice_commit_seconds_sum") == 99.0011
    assert (sample("sluice_committed_batches_total"), sample("sluice_committed_bytes_total")) == (6, 1050)


def test_scrape_succeeds_while_requests_of_new_versions_are_counted() -> None:
    """The event loop counts requests, and a thread renders a scrape."""
    metrics = Metrics()
    ended = threading.Event()

    def count() -> None:
        version = 0
        while not ended.is_set():
            version += 1
            metrics.request_series("produce", version).observe(0.001, 0)

    counting = threading.Thread(target=count)
    counting.start()
    try:
        while sum(len(metric.samples) for metric in metrics.registry.collect()) < 20_000:
            pass
    finally:
        ended.set()
        counting.join()
