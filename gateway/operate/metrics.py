"""The node's counters of its own work.

The one idea: counting must cost less than the work it counts. Requests and commits, of which there are thousands per
second, are added to plain lists that only a scrape turns into samples. Everything rarer uses prometheus_client as it
is. Topics, groups and lag are not counted here: they are read from storage at scrape time
(`gateway/operate/exporter.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from platform import python_version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.version import program_version
from protocol.errors import ErrorCode

disable_created_metrics()
"""Do not export a second, unused series per counter."""

OPERATIONS = ("install_routed", "install_owned", "remove_routed", "confirm_remove", "discarded")
"""Operations of reconciliation, by their names in `gateway/log/catalog.py`."""

COMMIT_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 10.0)
REQUEST_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 30.0)


class RequestSeries:
    """Durations and outcomes of one version of one API."""

    __slots__ = ("_buckets", "_outcomes", "_sum_s")

    def __init__(self) -> None:
        self._buckets = [0] * (len(REQUEST_BUCKETS_S) + 1)
        self._sum_s = 0.0
        self._outcomes: dict[int, int] = {}

    def observe(self, duration_s: float, error_code: int) -> None:
        """Count one answered request; `error_code` is the response's top-level code, 0 if it has none."""
        self._buckets[bisect_left(REQUEST_BUCKETS_S, duration_s)] += 1
        self._sum_s += duration_s
        outcomes = self._outcomes
        outcomes[error_code] = outcomes.get(error_code, 0) + 1

    def snapshot(self) -> tuple[list[tuple[str, float]], float, dict[int, int]]:
        """Return cumulative buckets in Prometheus' form, the sum of seconds, and the count by code."""
        return _cumulative(REQUEST_BUCKETS_S, self._buckets), self._sum_s, dict(self._outcomes)


def _cumulative(bounds_s: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return buckets in Prometheus' form."""
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*bounds_s, None), counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound is None else str(bound), total))
    return buckets


class _Commits(Collector):
    """Numbers about durable group commits."""

    def __init__(self) -> None:
        self._counts = [0] * (len(COMMIT_BUCKETS_S) + 1)
        self._sum_s = 0.0
        self._batches = 0
        self._size_bytes = 0

    def observe(self, batches: int, size_bytes: int, duration_s: float) -> None:
        self._counts[bisect_left(COMMIT_BUCKETS_S, duration_s)] += 1
        self._sum_s += duration_s
        self._batches += batches
        self._size_bytes += size_bytes

    def collect(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(
            "sluice_commit_seconds",
            "Durable group commits of record batches.",
            buckets=_cumulative(COMMIT_BUCKETS_S, self._counts),
            sum_value=self._sum_s,
        )
        yield CounterMetricFamily("sluice_committed_batches", "Record batches made durable.", value=self._batches)
        yield CounterMetricFamily(
            "sluice_committed_bytes", "Bytes of record batches made durable.", value=self._size_bytes
        )


class _Requests(Collector):
    def __init__(self) -> None:
        self.series: dict[tuple[str, int], RequestSeries] = {}

    def collect(self) -> Iterator[Metric]:
        durations = HistogramMetricFamily(
            "sluice_request_duration_seconds",
            "From the complete request to its encoded answer, time spent parked included.",
            labels=["api", "version"],
        )
        requests = CounterMetricFamily(
            "sluice_requests", "Answered requests by the answer's top-level error.", labels=["api", "version", "error"]
        )
        # A thread renders a scrape, and the event loop may add a series in the meantime.
        for (api, version), series in self.series.copy().items():
            buckets, sum_s, outcomes = series.snapshot()
            if not outcomes:
                continue
            durations.add_metric([api, str(version)], buckets, sum_s)
            for code, count in outcomes.items():
                requests.add_metric([api, str(version), ErrorCode(code).name], count)
        yield durations
        yield requests


class _TopicBytes(Collector):
    """Bytes of record batches by topic, in both directions. At most `max_series` topics are shown."""

    def __init__(self, max_series: int) -> None:
        self.taken: dict[str, int] = {}
        self.given: dict[str, int] = {}
        self._max_series = max_series

    def collect(self) -> Iterator[Metric]:
        for name, documentation, counts in (
            ("sluice_topic_bytes_in", "Bytes of record batches that producers appended through this node.", self.taken),
            ("sluice_topic_bytes_out", "Bytes of record batches that this node gave consumers.", self.given),
        ):
            family = CounterMetricFamily(name, documentation, labels=["topic"])
            for topic, size_bytes in islice(counts.copy().items(), self._max_series):
                family.add_metric([topic], size_bytes)
            yield family


class _Watched(Collector):
    """Counters whose values other parts of the node keep: name, documentation, label, and values by label."""

    def __init__(self) -> None:
        self._counters: list[tuple[str, str, str, Mapping[str, Callable[[], int]]]] = []

    def add(self, name: str, documentation: str, label: str, values: Mapping[str, Callable[[], int]]) -> None:
        self._counters.append((name, documentation, label, values))

    def collect(self) -> Iterator[Metric]:
        for name, documentation, label, values in self._counters:
            family = CounterMetricFamily(name, documentation, labels=[label] if label else [])
            for value, count in values.items():
                family.add_metric([value] if label else [], count())
            yield family


class Metrics:
    """The node's metrics registry, and the counters that its parts receive."""

    def __init__(self, max_series: int = 5_000) -> None:
        """Create the counters. `max_series` is the most topics that one scrape shows."""
        self.registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self.registry)
        build = Gauge(
            "sluice_build_info",
            "The versions of the program and of Python; always 1.",
            ["version", "python"],
            registry=self.registry,
        )
        build.labels(program_version(), python_version()).set(1)
        self._topic_bytes = _TopicBytes(max_series)
        self.registry.register(self._topic_bytes)
        self._watched = _Watched()
        self.registry.register(self._watched)
        self._requests = _Requests()
        self.registry.register(self._requests)

        self.connections = self._gauge("connections", "Open client connections.")
        self.connections_opened = self._counter("connections_opened", "Client connections accepted.")
        self.idle_closed = self._counter("connections_idle_closed", "Connections closed for being idle.")
        self.held_bytes = self._gauge("held_bytes", "Bytes of requests in work and of answers not yet read.")
        self.upstreams = self._gauge("forwarding_connections", "Connections to other nodes that carry requests.")
        self.forwarded_requests = self._counter(
            "forwarded_requests", "Requests that another node had to answer.", "api"
        )
        self.forwarding_failed = self._counter(
            "forwarding_failed", "Forwarded requests that were refused because the node did not respond.", "api"
        )
        self.protocol_errors = self._counter("protocol_errors", "Connections closed or refused by reason.", "reason")
        self.unsupported_versions = self._counter(
            "unsupported_versions", "Requests answered with UNSUPPORTED_VERSION.", "api"
        )
        self.internal_errors = self._counter("internal_errors", "Requests that ended in a bug of ours.", "api")
        self.audit_lines_lost = self._counter("audit_lines_lost", "Lines that the audit log could not take.")
        self.trace_spans_dropped = self._counter(
            "trace_spans_dropped", "Spans that were not delivered: the queue was full, or the collector refused them."
        )
        self.storage_errors = self._counter(
            "storage_errors", "Requests, or parts of them, that storage could not serve.", "api"
        )

        self._authentications = {
            (again, ok): self._counter(
                f"{'successful' if ok else 'failed'}_{'reauthentication' if again else 'authentication'}",
                f"Clients that {'have authenticated' if ok else 'failed to authenticate'}{' again' if again else ''}.",
                "listener",
                "mechanism",
            )
            for again in (False, True)
            for ok in (False, True)
        }
        self._expired_connections = self._counter(
            "expired_connections_killed", "Connections closed whose client had not authenticated again.", "listener"
        )

        commits = _Commits()
        self.registry.register(commits)
        self.observe_commit: Callable[[int, int, float], None] = commits.observe
        """Function that counts the batches, bytes and seconds of a durable group commit."""
        self.refused_batches = self._counter("refused_batches", "Record batches refused, by error.", "error")
        self.group_rebalances = self._counter("group_rebalances", "Groups that entered PreparingRebalance.")
        self.group_violations = self._counter(
            "group_protocol_violations",
            "Generations in which consumers or their leader departed from the cooperative protocol, by what they did.",
            "violation",
        )
        self.group_withheld = self._counter(
            "group_partitions_withheld",
            "Partitions that group.cooperative.guard withheld from their new owners because others still claimed them.",
        )
        self.groups_half_way = self._gauge(
            "groups_mixed_mode", "Groups half way between eager and cooperative assignment: an upgrade to be finished."
        )
        self.group_handoffs = self._counter(
            "group_handoffs", "Partitions whose new owner had to wait for the old one, by how that ended.", "reason"
        )
        self.group_handoffs_forced = self._counter(
            "group_handoffs_forced", "Partitions given away although the old owner may not have been done with them."
        )
        self.share_partitions = self._gauge("share_partitions", "Share partitions in memory.")
        self.share_dead_letters = self._counter(
            "share_dead_letters", "Undeliverable records of share groups that were written to dead-letter topics."
        )
        self.share_dead_letters_failed = self._counter(
            "share_dead_letters_failed", "Undeliverable records that could not be written to a dead-letter topic."
        )
        self.share_sessions = self._gauge("share_sessions", "Share sessions that are open.")
        self.group_handoffs_pending = self._gauge(
            "group_handoffs_pending", "Partitions whose new owner waits for the old one now."
        )
        self.group_handoff_wait = self._histogram(
            "group_handoff_wait_seconds",
            "How long new owners of partitions waited for the old ones.",
            (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0),
        )
        self.journal_rows = self._counter("journal_rows", "Rows written to the journal of groups.")
        self.journal_dropped = self._counter(
            "journal_dropped_rows",
            "Rows of the journal that were not written: its queue was full, or Postgres refused.",
        )
        self.transactions_ended = self._counter(
            "transactions_ended",
            "Transactions that this node has ended: as their producer asked (committed, aborted), because another one "
            "or an administrator came (fenced), or because they took too long (timed_out).",
            "outcome",
        )
        self.throttled_seconds = self._counter(
            "throttled_seconds",
            "Time for which clients above a quota were told to be silent, by the quota's key.",
            "quota",
        )
        self.denials = self._counter(
            "authorizer_denials",
            "What was asked for and refused by the authorizer, by the type of the resource and the operation.",
            "resource",
            "operation",
        )
        self.leases_held = self._gauge("coordinator_leases", "Group coordinator shards this node holds.")

        self._reconcile_passes = self._counter(
            "reconcile_passes", "Passes over the committed metadata, by what woke them.", "trigger"
        )
        self._reconcile_skipped = self._counter("reconcile_passes_skipped", "Passes that found nothing to do.")
        self._reconcile_seconds = self._histogram(
            "reconcile_pass_seconds", "Passes over the committed metadata.", (0.0005, 0.001, 0.005, 0.02, 0.1, 0.5, 5.0)
        )
        self._reconcile_failures = self._counter(
            "partitions_reconcile_failures", "Failed steps of reconciliation, by cause.", "cause"
        )
        self.partitions_materialised = self._counter(
            "partitions_materialised", "Partitions whose clients have come to be pointed to this node."
        )
        self.partitions_removed = self._counter(
            "partitions_removed", "Partitions that were this node's, and of which it has dropped the last."
        )
        self.listener_reconnects = self._counter(
            "listener_reconnects", "Times that the connection on which this node hears of others has begun."
        )
        self.topics_removed = self._counter(
            "topics_removed", "Deleted topics of which this node has removed the last of the data."
        )

        self.event_loop_lag = self._histogram(
            "event_loop_lag_seconds",
            "How late a timer of the event loop fires.",
            (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0),
        )
        self.loop_failures = self._counter("background_failures", "Background passes that raised.", "loop")
        self._loop_age = Gauge(
            "sluice_background_last_success_age_seconds",
            "Seconds since a background pass last succeeded.",
            ["loop"],
            registry=self.registry,
        )

    def request_series(self, api: str, version: int) -> RequestSeries:
        """Return the series of one API and version, created once and kept by its route."""
        return self._requests.series.setdefault((api, version), RequestSeries())

    def authenticated(self, listener: str, mechanism: str, *, again: bool, ok: bool) -> None:
        self._authentications[again, ok].labels(listener, mechanism).inc()

    def session_expired(self, listener: str) -> None:
        self._expired_connections.labels(listener).inc()

    def count_handoff(self, reason: str, forced: bool, waited_ms: int) -> None:
        self.group_handoffs.labels(reason).inc()
        self.group_handoff_wait.observe(waited_ms / 1000)
        if forced:
            self.group_handoffs_forced.inc()

    def count_topic_bytes_in(self, topic: str, size_bytes: int) -> None:
        taken = self._topic_bytes.taken
        taken[topic] = taken.get(topic, 0) + size_bytes

    def count_topic_bytes_out(self, topic: str, size_bytes: int) -> None:
        given = self._topic_bytes.given
        given[topic] = given.get(topic, 0) + size_bytes

    def forget_topic(self, topic: str) -> None:
        """Remove the metrics of a deleted topic."""
        self._topic_bytes.taken.pop(topic, None)
        self._topic_bytes.given.pop(topic, None)

    def watch_damaged_chunks(self, count: Callable[[], int]) -> None:
        self._watched.add(
            "sluice_damaged_chunks",
            "Times that records were asked for whose bytes are missing or wrong.",
            "",
            {"": count},
        )

    def observe_reconcile_pass(self, trigger: str, skipped: bool, duration_s: float) -> None:
        self._reconcile_passes.labels(trigger).inc()
        self._reconcile_seconds.observe(duration_s)
        if skipped:
            self._reconcile_skipped.inc()

    def observe_reconcile_failure(self, cause: str) -> None:
        self._reconcile_failures.labels(cause).inc()

    def watch_cluster(
        self,
        *,
        revision_lag: Callable[[], int],
        leases_moved: Mapping[str, Callable[[], int]],
        jobs_held: Callable[[], int],
        owned: Callable[[], int],
        deferred: Callable[[], int],
        performed: Mapping[str, int],
        merged: Callable[[], int],
        wakeups: Mapping[str, int],
    ) -> None:
        """Export the counters of the node's cluster parts."""
        self._gauge("reconcile_revision_lag", "Committed changes heard of and not known yet.").set_function(
            revision_lag
        )
        self._watched.add(
            "sluice_leases_moved", "Leases handed over to other live nodes, by kind.", "kind", leases_moved
        )
        self._gauge("job_leases", "Leases of jobs that this node holds.").set_function(jobs_held)
        self._gauge("partitions_owned", "Partitions whose clients are pointed to this node.").set_function(owned)
        self._gauge(
            "reconcile_deferred", "Topics that the last pass has left to a later one: removed, or not placed yet."
        ).set_function(deferred)
        self._watched.add(
            "sluice_reconcile_operations",
            "Operations on what this node holds, by name; `discarded` found nothing to do.",
            "operation",
            {name: partial(performed.__getitem__, name) for name in OPERATIONS},
        )
        self._watched.add("sluice_reconcile_wakes_merged", "Wake-ups that found one waiting.", "", {"": merged})
        for name, documentation in (
            ("sent", "Announcements of appends sent."),
            ("merged", "Appends that were announced together with a later one."),
            ("heard", "Announcements of appends heard."),
            ("missed", "Times that announcements were found missing."),
            ("late", "Announcements that came when they had been found missing."),
        ):
            self._watched.add(f"sluice_wakeups_{name}", documentation, "", {"": partial(wakeups.__getitem__, name)})

    def watch_loop(self, name: str, age_s: Callable[[], float]) -> None:
        """Export, as a gauge, how long ago a background pass last succeeded."""
        self._loop_age.labels(name).set_function(age_s)

    def health(self) -> list[tuple[str, str, float]]:
        """Return name, label (empty for none) and value of each figure about the cluster, the stores, and the
        background passes of this node. Names are those of the metrics, and the label of `sluice_build_info` is the
        program's version."""
        collectors = (self._watched, self._loop_age, self.loop_failures, self.storage_errors)
        return [("sluice_build_info", program_version(), 1.0)] + [
            (sample.name, next(iter(sample.labels.values()), ""), sample.value)
            for collector in collectors
            for metric in collector.collect()
            for sample in metric.samples
            if not sample.name.endswith("_created")
        ]

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"sluice_{name}", documentation, labels, registry=self.registry)

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(f"sluice_{name}", documentation, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets_s: tuple[float, ...]) -> Histogram:
        return Histogram(f"sluice_{name}", documentation, buckets=buckets_s, registry=self.registry)
