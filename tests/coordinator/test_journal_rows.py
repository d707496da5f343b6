"""Journal rows of a classic group's rebalances, by steps."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from gateway.coordinator.classic.model import Event
from gateway.coordinator.machine import Step
from gateway.coordinator.requests import Protocols
from gateway.groups.journal_rows import LONG_REBALANCE_MS, Rows
from gateway.groups.journal_sheet import Happened
from gateway.groups.kinds import MACHINES
from protocol.consumer import Assignment, Subscription, TopicPartition, encode_assignment, encode_subscription
from storage.journal import JournalEvent, JournalRow

from .scene import Scene


def claiming(*partitions: int) -> Protocols:
    owned = (TopicPartition("t", partitions),) if partitions else ()
    return (("cooperative-sticky", encode_subscription(Subscription(3, ("t",), None, owned, -1))),)


def given(*partitions: int) -> bytes:
    return encode_assignment(Assignment(1, (TopicPartition("t", partitions),) if partitions else ()))


class Topics:
    def name_of(self, topic_id: UUID) -> str:
        raise AssertionError("classic groups name topics")

    def id_of(self, name: str) -> UUID | None:
        return None

    def partition_count_of(self, name: str) -> int:
        raise AssertionError("classic groups own partitions, not tasks")


class Journaled(Scene):
    """A scene that keeps the journal rows of every step."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.rows: list[JournalRow] = []
        self._made = Rows(MACHINES, Topics())

    def send_silent(self, event: Event) -> Step:
        before = self.group
        taken = super().send_silent(event)
        if taken.facts:
            self.rows += self._made.of(Happened(before, self.group, taken.facts, 0, self.now_ms, 1))
        return taken

    def generations(self) -> list[tuple[str | None, int | None]]:
        events = (row for row in self.rows if isinstance(row, JournalEvent) and row.kind == "generation_created")
        return [(row.detail, row.wait_ms) for row in events]


def rebalanced(scene: Journaled, after_ms: int) -> str:
    """Let a third member join a group of two. The second member rejoins `late_ms` after the others. Return the second
    member's id.
    """
    a, b = scene.stable("a", "b")
    scene.rows.clear()
    scene.join("c")
    scene.join("a", a)
    scene.advance(after_ms)
    scene.join("b", b)
    return b


def test_a_rebalance_that_took_long_names_the_member_that_joined_last() -> None:
    scene = Journaled()
    b = rebalanced(scene, LONG_REBALANCE_MS)
    assert scene.generations() == [(b, LONG_REBALANCE_MS)]


def test_partitions_withheld_by_the_guard_are_a_journal_row() -> None:
    scene = Journaled(group_cooperative_guard=True)
    a, b = scene.completing("a", "b", offer=claiming())
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0, 1), b: given()})
    scene.join("a", a, offer=claiming(0, 1))
    scene.join("b", b, offer=claiming())
    scene.sync("b", b)
    scene.sync("a", a, {a: given(0), b: given(1)})
    observed = [row for row in scene.rows if isinstance(row, JournalEvent) and row.kind == "observed"]
    (row,) = [row for row in observed if row.reason == "partitions_withheld"]
    assert row.detail == f"withheld from {b} (t-1)"


def test_short_rebalance_names_no_member() -> None:
    scene = Journaled()
    rebalanced(scene, LONG_REBALANCE_MS - 1)
    assert scene.generations() == [(None, None)]
