"""Journal rows of a share group: joins and leaves with their reasons, and no ownership."""

from __future__ import annotations

from uuid import UUID

from gateway.coordinator.classic.model import Group
from gateway.coordinator.machine import Event, RequestId, Tick
from gateway.coordinator.requests import DeleteGroup
from gateway.coordinator.settings import Settings
from gateway.groups.journal_rows import Rows
from gateway.groups.journal_sheet import Happened
from gateway.groups.kinds import MACHINES, AnyGroup
from storage.journal import JournalEvent, JournalMember, JournalRow

from .test_group import CLUSTER, SETTINGS, A, B, heartbeat


class Topics:
    """The journal asks for no topics, because no member owns a partition."""

    def name_of(self, topic_id: UUID) -> str:
        raise AssertionError(topic_id)

    def id_of(self, name: str) -> UUID | None:
        raise AssertionError(name)

    def partition_count_of(self, name: str) -> int:
        raise AssertionError(name)


def test_share_members_that_join_and_leave_are_in_the_journal() -> None:
    made = Rows(MACHINES, Topics())
    group: AnyGroup = Group("g")
    rows: list[JournalRow] = []

    def play(event: Event, now_ms: int) -> None:
        nonlocal group
        before = group
        taken = MACHINES.step(before, event, CLUSTER, now_ms, Settings(share=SETTINGS))
        group = taken.group
        if taken.facts:
            rows.extend(made.of(Happened(before, group, taken.facts, 0, now_ms, 1)))

    play(heartbeat(A, 0, ("t1",)), 0)
    assert events(rows) == [
        ("rebalance_started", "member_joined", A),
        ("member_joined", "new", A),
        ("generation_created", None, None),
        ("assignment_stored", None, None),
        ("member_synced", None, A),
        ("rebalance_completed", None, None),
    ]
    assert members(rows) == [A]

    rows.clear()
    play(heartbeat(B, 0, ("t1",)), 100)
    assert events(rows)[-2:] == [("assignment_stored", None, None), ("member_synced", None, B)]
    assert members(rows) == [B]
    rows.clear()
    play(heartbeat(A, 1), 200)
    assert events(rows) == [("member_synced", None, A), ("rebalance_completed", None, None)]

    rows.clear()
    play(heartbeat(B, -1), 300)
    assert events(rows) == [
        ("member_left", "leave", B),
        ("rebalance_started", "member_left", B),
        ("generation_created", None, None),
    ]
    rows.clear()
    play(heartbeat(A, 2), 400)
    assert events(rows) == [
        ("assignment_stored", None, None),
        ("member_synced", None, A),
        ("rebalance_completed", None, None),
    ]

    rows.clear()
    play(Tick(), 60_000)
    play(DeleteGroup(RequestId(1)), 60_001)
    assert events(rows) == [
        ("member_expired", "session_timeout", A),
        ("rebalance_started", "member_expired", A),
        ("deleted", "requested", None),
    ]


def events(rows: list[JournalRow]) -> list[tuple[str, str | None, str | None]]:
    return [(row.kind, row.reason, row.member_id) for row in rows if isinstance(row, JournalEvent)]


def members(rows: list[JournalRow]) -> list[str]:
    return [row.member_id for row in rows if isinstance(row, JournalMember)]
