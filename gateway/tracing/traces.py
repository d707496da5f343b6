"""Turn what a node has finished into spans: requests, group commits of the log, and rebalances of groups.

The one idea: every span is made after its work is over, so no stage of a request carries a span. A node without a
collector has no object of this class, and each place that would report compares with None.

Spans have no parents: the context that clients put into the headers of records is neither read nor written.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from gateway.net.context import RequestContext
from gateway.tracing.exporter import Exporter
from gateway.tracing.rebalances import Rebalances
from gateway.tracing.spans import Kind, Span
from protocol.errors import ErrorCode
from protocol.shown import shown
from storage.journal import JournalRow

ObserveCommit = Callable[[int, int, float], None]
"""Takes batches, bytes and seconds of a durable group commit."""


class Traces:
    """The spans of one node. `sample` is the share of successful requests and commits that get one, from 0 to 1.
    Failed requests and rebalances always get one."""

    def __init__(self, exporter: Exporter, sample: float, *, chance: Callable[[], float] = random.random) -> None:
        """`chance` returns a number from 0 up to, but not including, 1."""
        self.exporter = exporter
        self._sample = sample
        self._chance = chance
        self._rebalances = Rebalances()

    def request(self, context: RequestContext[object], took_s: float, code: int, answer_bytes: int) -> None:
        """Report an answered request. `code` is the answer's own error code, 0 if each element has its own."""
        if code == 0 and self._is_left_out():
            return
        connection = context.connection
        error = _error_name(code) if code else None
        attributes: list[tuple[str, str | int]] = [
            ("messaging.system", "kafka"),
            ("messaging.client.id", shown(context.client_id or "")),
            ("network.peer.address", connection.client_host.removeprefix("/")),
            ("kafka.api.version", context.version),
            ("kafka.error.code", int(code)),
            ("sluice.listener", connection.listener),
            ("sluice.answer.bytes", answer_bytes),
        ]
        if error is not None:
            attributes.append(("error.type", error))
        end_ns = time.time_ns()
        name = context.api_key.name.lower()
        self.exporter.put(Span(name, Kind.SERVER, end_ns - int(took_s * 1e9), end_ns, attributes, error))

    def commits(self, observe: ObserveCommit) -> ObserveCommit:
        """Return an observer of commits that calls `observe` and reports the commit."""

        def observe_and_report(batches: int, size_bytes: int, took_s: float) -> None:
            observe(batches, size_bytes, took_s)
            if self._is_left_out():
                return
            attributes = (
                ("db.system.name", "postgresql"),
                ("sluice.commit.batches", batches),
                ("sluice.commit.bytes", size_bytes),
            )
            end_ns = time.time_ns()
            self.exporter.put(Span("commit", Kind.CLIENT, end_ns - int(took_s * 1e9), end_ns, attributes))

        return observe_and_report

    def rebalances(self, rows: Sequence[JournalRow]) -> None:
        """Report the rebalances that the next rows of the journal complete."""
        for span in self._rebalances.spans(rows):
            self.exporter.put(span)

    def _is_left_out(self) -> bool:
        return self._sample < 1 and self._chance() >= self._sample


def _error_name(code: int) -> str:
    try:
        return ErrorCode(code).name
    except ValueError:
        return str(int(code))
