"""Output of `sluice groups history` about waits, from rows of the journal."""

from __future__ import annotations

from typing import Any

from gateway.commands.history import told
from storage.journal import GroupHistory


def event(seq: int, kind: str, member_id: str | None = None, **more: Any) -> dict[str, Any]:
    blank = dict.fromkeys(
        ("reason", "detail", "state_after", "client_id", "member_count", "wait_ms", "row_count", "protocol_name")
    )
    row = {"seq": seq, "at_ms": seq, "node_id": 1, "group_id": "g", "generation_id": 4}
    return {**blank, **row, "kind": kind, "member_id": member_id, **more}


def handoff(seq: int, phase: str, partition: int, reason: str | None = None) -> dict[str, Any]:
    row = {"seq": seq, "at_ms": seq, "node_id": 1, "generation_id": 4, "phase": phase, "mode": "drain"}
    members = {"source_member_id": "a", "target_member_id": "b"}
    return {**row, **members, "topic": "t", "partition": partition, "reason": reason, "wait_ms": 30_000}


def words(events: list[dict[str, Any]], handoffs: list[dict[str, Any]]) -> list[str]:
    return [str(row["what"]) for row in told(GroupHistory(events, [], [], handoffs))]


def test_a_member_that_may_not_read_yet_is_not_shown_as_done() -> None:
    events = [
        event(3, "member_synced", "a"),
        event(4, "member_synced", "b"),
        event(5, "rebalance_completed", wait_ms=10_200, member_count=2),
        event(8, "member_synced", "b"),
        event(9, "rebalance_completed", member_count=2),
    ]
    handoffs = [
        *(handoff(1, "begun", 0), handoff(2, "begun", 1)),
        *(handoff(6, "ended", 0, "processed"), handoff(7, "ended", 1, "timeout")),
    ]
    said = words(events, handoffs)
    assert said[2:5] == [
        "a has its assignment",
        "b has its assignment, but may not read t[0-1] yet",
        "rebalance complete after 10.2 s, 2 members; b may not read t[0-1] yet",
    ]
    assert said[-2:] == ["b has its assignment", "complete, 2 members"]


def test_partitions_whose_wait_has_ended_are_left_out() -> None:
    handoffs = [handoff(1, "begun", 0), handoff(2, "begun", 1), handoff(3, "ended", 0, "drained")]
    assert words([event(4, "member_synced", "b")], handoffs)[-1] == "b has its assignment, but may not read t[1] yet"


def test_a_long_rebalance_names_the_members_it_waited_for() -> None:
    created = event(1, "generation_created", "a", member_count=2, protocol_name="range", detail="b", wait_ms=37_000)
    assert words([created], []) == ["generation 4: 2 members, range, led by a; b joined last, after 37.0 s"]
