"""The ownership timeline, from rows of the journal."""

from __future__ import annotations

import json
import time
from typing import Any

from gateway.console.timeline import MAX_SPANS, duration, timeline
from storage.console import Stretch

A, B, C = "a-1111", "b-2222", "c-3333"


class Rows:
    """Rows of a journal, written in order."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.ownership: list[dict[str, Any]] = []
        self.before: list[dict[str, Any]] = []
        self.handoffs: list[dict[str, Any]] = []
        self.refusals: list[dict[str, Any]] = []
        self._seq = 0

    def _next(self, at_ms: int, **columns: Any) -> dict[str, Any]:
        self._seq += 1
        return {"seq": self._seq, "at_ms": at_ms, "node_id": 1, "generation_id": 1, **columns}

    def event(self, at_ms: int, kind: str, member: str | None = None, **columns: Any) -> None:
        empty = dict.fromkeys(
            ("reason", "detail", "state_before", "state_after", "group_instance_id", "client_host", "protocol_name")
        )
        row = self._next(at_ms, group_id="g", group_type="classic", kind=kind, member_id=member)
        row |= {**empty, "client_id": None, "member_count": None, "wait_ms": None, "row_count": None, **columns}
        self.events.append(row)

    def owns(self, at_ms: int, change: str, member: str, partition: int, *, before: bool = False) -> None:
        row = self._next(at_ms, topic="orders", partition=partition, change=change, member_id=member)
        (self.before if before else self.ownership).append(row)

    def hands(self, at_ms: int, phase: str, source: str, target: str, reason: str | None = None) -> None:
        row = self._next(at_ms, topic="orders", partition=0, phase=phase, mode="ack", reason=reason, wait_ms=None)
        self.handoffs.append({**row, "source_member_id": source, "target_member_id": target, "mark_offset": None})

    def drawn(self, from_ms: int = 0, to_ms: int = 100_000) -> dict[str, Any]:
        """Return the timeline in the form that the page receives."""
        members = {
            member: {"member_id": member, "client_id": client, "client_host": "/10.0.0.1"}
            for member, client in ((A, "ana"), (B, "bob"), (C, "bob"))
        }
        stretch = Stretch(self.events, self.ownership, self.before, self.handoffs, self.refusals, members, is_cut=False)
        drawn: dict[str, Any] = json.loads(json.dumps(timeline(stretch, from_ms, to_ms)))
        return drawn


def spans(drawn: dict[str, Any], partition: int = 0) -> list[tuple[Any, ...]]:
    lane = next(lane for lane in drawn["lanes"] if lane["partition"] == partition)
    return [(span["member"], span["from"], span["to"]) for span in lane["spans"]]


def test_partition_that_moves_has_two_spans():
    rows = Rows()
    rows.owns(10, "assigned", A, 0)
    rows.owns(50, "released", A, 0)
    rows.owns(60, "assigned", B, 0)
    assert spans(rows.drawn()) == [(A, 10, 50), (B, 60, None)]


def test_owner_before_the_window_owns_from_its_beginning():
    rows = Rows()
    rows.owns(10, "assigned", A, 0, before=True)
    rows.owns(5_000, "released", A, 0)
    drawn = rows.drawn(1_000)
    assert spans(drawn) == [(A, 1_000, 5_000)]
    assert drawn["lanes"][0]["spans"][0]["earlier"]


def test_partition_released_before_the_window_has_no_owner():
    rows = Rows()
    rows.owns(10, "assigned", A, 0, before=True)
    rows.owns(20, "released", A, 0, before=True)
    rows.owns(30, "assigned", B, 1, before=True)
    assert [lane["partition"] for lane in rows.drawn(1_000)["lanes"]] == [1]


def test_loaded_group_ends_the_spans_that_it_does_not_restate():
    rows = Rows()
    rows.owns(10, "assigned", A, 0)
    rows.owns(10, "assigned", B, 1)
    rows.event(500, "loaded", member_count=1)
    rows.owns(500, "kept", B, 1)
    drawn = rows.drawn()
    assert spans(drawn, 0) == [(A, 10, 500)]
    assert spans(drawn, 1) == [(B, 10, None)]


def lost_member() -> Rows:
    rows = Rows()
    rows.owns(10, "assigned", A, 0)
    rows.owns(10, "assigned", A, 1)
    rows.event(20_000, "member_expired", A, reason="session_timeout", wait_ms=6_000)
    rows.owns(20_000, "released", A, 0)
    rows.owns(20_000, "released", A, 1)
    rows.event(20_000, "rebalance_started", reason="member_expired", member_id=A)
    rows.owns(21_000, "assigned", B, 0)
    rows.owns(21_000, "assigned", B, 1)
    return rows


def test_lost_member_is_told_with_the_time_without_a_reader():
    rows = lost_member()
    rows.event(21_500, "member_synced", B)
    (story,) = rows.drawn()["stories"]
    assert story["title"] == "ana was lost"
    assert story["heard"] == 14_000
    assert story["gap"] == 7_500
    assert "orders[0-1] went to bob ·2222." in story["text"]
    assert "Nobody read them for up to 7.5 s." in story["text"]


def test_lost_member_whose_partitions_wait_for_a_handoff_costs_until_its_end():
    rows = lost_member()
    rows.hands(21_000, "begun", A, B)
    rows.hands(30_000, "ended", A, B, "timeout")
    (story,) = rows.drawn()["stories"]
    assert story["gap"] == 16_000


def test_lost_member_without_successor_has_no_end():
    rows = Rows()
    rows.owns(10, "assigned", A, 0)
    rows.event(20_000, "member_expired", A, reason="session_timeout", wait_ms=6_000)
    rows.owns(20_000, "released", A, 0)
    (story,) = rows.drawn()["stories"]
    assert story["gap"] is None
    assert "Nobody has taken orders[0] over yet." in story["text"]


def test_stories_of_a_member_that_loses_many_partitions_again_and_again_are_told_soon():
    """A page draws such a group every few seconds, and each step of its thread delays the node's clients."""
    rows = Rows()
    for number in range(10):
        at_ms, member = 1_000 * number, A if number % 2 else B
        for partition in range(1_000):
            rows.owns(at_ms, "assigned", member, partition)
            rows.event(at_ms, "heartbeat_gap", C)
        rows.event(at_ms + 500, "member_expired", member, reason="session_timeout", wait_ms=400)
        for partition in range(1_000):
            rows.owns(at_ms + 500, "released", member, partition)
    began_s = time.thread_time()
    stories = rows.drawn()["stories"]
    assert time.thread_time() - began_s < 2
    assert [story["gap"] for story in stories] == [900] * 9 + [None]


def test_words_of_a_group_with_many_former_members_are_told_soon():
    rows = Rows()
    for number in range(50_000):
        rows.event(number, "member_joined", f"{A}-{number:032}", client_id="ana", reason="new")
        rows.owns(number, "assigned", f"{A}-{number:032}", 0)
    began_s = time.thread_time()
    words = rows.drawn()["words"]
    assert time.thread_time() - began_s < 2
    assert words[-1]["what"].startswith("ana ·9999 receives orders")


def test_mark_of_a_lost_member_says_for_how_long_it_was_silent():
    (mark,) = [mark for mark in lost_member().drawn()["marks"] if mark["kind"] == "lost"]
    assert mark["silent"] == 6_000
    assert "is lost" in mark["what"]


def test_rebalance_ends_when_it_is_complete():
    rows = Rows()
    rows.event(10, "rebalance_started", A, reason="member_joined")
    rows.event(40, "rebalance_started", B, reason="member_joined")
    rows.event(90, "rebalance_completed", state_after="Stable")
    first, second = rows.drawn()["rebalances"]
    assert (first["from"], first["to"], first["superseded"]) == (10, 40, True)
    assert (second["from"], second["to"]) == (40, 90)


def test_handoff_is_a_wait_with_its_end():
    rows = Rows()
    rows.owns(10, "assigned", A, 0)
    rows.hands(20, "begun", A, B)
    rows.hands(70, "ended", A, B, "timeout")
    (wait,) = rows.drawn()["lanes"][0]["waits"]
    assert (wait["from"], wait["to"], wait["forced"]) == (20, 70, True)


def test_words_use_the_names_of_clients():
    rows = Rows()
    rows.event(10, "member_left", A, reason="leave")
    assert rows.drawn()["words"][-1]["what"] == "ana leaves"


def test_client_id_of_two_members_is_told_with_the_end_of_the_member_id():
    rows = Rows()
    rows.owns(10, "assigned", B, 0)
    rows.owns(10, "assigned", C, 1)
    labels = rows.drawn()["members"]
    assert (labels[B]["label"], labels[C]["label"]) == ("bob ·2222", "bob ·3333")


def test_many_short_spans_are_merged():
    rows = Rows()
    for at_ms in range(0, 20_000, 2):
        rows.owns(at_ms, "assigned", A if at_ms % 4 else B, 0)
        rows.owns(at_ms + 1, "released", A if at_ms % 4 else B, 0)
    drawn = rows.drawn(0, 100_000_000)
    (lane,) = drawn["lanes"]
    assert len(lane["spans"]) < MAX_SPANS / 10
    assert sum(span.get("merged", 1) for span in lane["spans"]) == 10_000


def test_durations_for_people():
    assert [duration(ms) for ms in (640, 12_340, 250_000, 7_260_000)] == ["640 ms", "12.3 s", "4 min 10 s", "2 h 1 min"]
