"""Spans of rebalances, from the rows of the journal.

The one idea: the journal knows when a rebalance began and when its last member was served, for every kind of group. So
a span is made of two of its rows. If a group begins another rebalance before the first one is over, the span covers
both, because the members have been without a stable assignment for the whole time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.tracing.spans import Kind, Span
from protocol.shown import shown
from storage.journal import JournalEvent, JournalRow

MAX_GROUPS = 10_000
"""Maximal number of groups whose rebalances are in progress at once. The oldest ones are forgotten first."""
MS_NS = 1_000_000
_OVER = frozenset({"Empty", "Dead"})
"""States in which a group has no member, so that its rebalance ends without a row of its own."""


@dataclass(slots=True)
class _Begun:
    row: JournalEvent
    restarts: int = 0


class Rebalances:
    """The rebalances that this node coordinates now."""

    def __init__(self) -> None:
        self._begun: OrderedDict[str, _Begun] = OrderedDict()

    def spans(self, rows: Iterable[JournalRow]) -> list[Span]:
        """Return a span for each rebalance that these rows, the next ones of the journal, complete."""
        made: list[Span] = []
        for row in rows:
            if not isinstance(row, JournalEvent):
                continue
            if row.kind == "rows_dropped":
                self._begun.clear()
            elif row.kind == "rebalance_started":
                self._begin(row)
            elif row.kind == "rebalance_completed" or row.kind == "loaded" or row.state_after in _OVER:
                begun = self._begun.pop(row.group_id, None)
                if begun is not None and row.kind == "rebalance_completed":
                    made.append(_span(begun, row))
        return made

    def _begin(self, row: JournalEvent) -> None:
        begun = self._begun.get(row.group_id)
        if begun is not None:
            begun.restarts += 1
            return
        self._begun[row.group_id] = _Begun(row)
        if len(self._begun) > MAX_GROUPS:
            self._begun.popitem(last=False)


def _span(begun: _Begun, completed: JournalEvent) -> Span:
    first = begun.row
    attributes: list[tuple[str, str | int]] = [
        ("messaging.system", "kafka"),
        ("messaging.consumer.group.name", shown(first.group_id)),
        ("sluice.group.type", completed.group_type),
        ("sluice.rebalance.reason", first.reason or ""),
        ("sluice.rebalance.restarts", begun.restarts),
        ("sluice.group.generation", completed.generation_id),
    ]
    if completed.member_count is not None:
        attributes.append(("sluice.group.members", completed.member_count))
    return Span("rebalance", Kind.INTERNAL, first.at_ms * MS_NS, completed.at_ms * MS_NS, attributes)
