"""Spans of rebalances, from rows of the journal."""

from __future__ import annotations

from typing import Any

from gateway.tracing.rebalances import MAX_GROUPS, Rebalances
from storage.journal import JournalEvent

SECOND = 1_000
SECOND_NS = 1_000_000_000


def event(kind: str, at_ms: int, group_id: str = "g", **columns: Any) -> JournalEvent:
    return JournalEvent(
        at_ms=at_ms, node_id=1, group_id=group_id, generation_id=7, group_type="classic", kind=kind, **columns
    )


def test_a_rebalance_has_a_span_from_its_start_to_its_completion() -> None:
    rebalances = Rebalances()
    assert rebalances.spans([event("rebalance_started", SECOND, reason="member_joined")]) == []
    assert rebalances.spans([event("member_joined", 2 * SECOND, state_after="PreparingRebalance")]) == []
    (span,) = rebalances.spans([event("rebalance_completed", 4 * SECOND, member_count=2, state_after="Stable")])
    assert (span.name, span.start_ns, span.end_ns) == ("rebalance", SECOND_NS, 4 * SECOND_NS)
    assert dict(span.attributes) == {
        "messaging.system": "kafka",
        "messaging.consumer.group.name": "g",
        "sluice.group.type": "classic",
        "sluice.rebalance.reason": "member_joined",
        "sluice.rebalance.restarts": 0,
        "sluice.group.generation": 7,
        "sluice.group.members": 2,
    }


def test_rebalances_of_several_groups_do_not_mix() -> None:
    spans = Rebalances().spans(
        [
            event("rebalance_started", 1, "a"),
            event("rebalance_started", 2, "b"),
            event("rebalance_completed", 3, "b"),
            event("rebalance_completed", 4, "a"),
        ]
    )
    assert [(dict(span.attributes)["messaging.consumer.group.name"], span.start_ns) for span in spans] == [
        ("b", 2_000_000),
        ("a", 1_000_000),
    ]


def test_a_rebalance_that_another_one_interrupts_is_one_span_that_counts_both() -> None:
    rows = [event("rebalance_started", at_ms) for at_ms in (1, 2, 3)]
    (span,) = Rebalances().spans([*rows, event("rebalance_completed", 9)])
    assert span.start_ns == 1_000_000
    assert dict(span.attributes)["sluice.rebalance.restarts"] == 2


def test_a_group_that_loses_its_members_or_its_coordinator_has_no_span_over_the_gap() -> None:
    for row in (
        event("member_left", 2, state_after="Empty"),
        event("deleted", 2, state_after="Dead"),
        event("loaded", 2),
        event("rows_dropped", 2, group_id=""),
    ):
        rebalances = Rebalances()
        assert rebalances.spans([event("rebalance_started", 1), row]) == []
        (span,) = rebalances.spans([event("rebalance_started", 5), event("rebalance_completed", 6)])
        assert span.start_ns == 5_000_000, row.kind


def test_a_completion_without_a_known_start_has_no_span() -> None:
    assert Rebalances().spans([event("rebalance_completed", 6)]) == []


def test_groups_beyond_the_bound_are_forgotten_oldest_first() -> None:
    rebalances = Rebalances()
    rebalances.spans([event("rebalance_started", 1, f"g{number}") for number in range(MAX_GROUPS + 1)])
    assert rebalances.spans([event("rebalance_completed", 2, "g0")]) == []
    assert len(rebalances.spans([event("rebalance_completed", 2, f"g{MAX_GROUPS}")])) == 1
