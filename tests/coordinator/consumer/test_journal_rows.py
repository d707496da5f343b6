"""Journal rows of a group that changes its protocol. They repeat all ownership, so that a reader of the rows knows each
owner.
"""

from __future__ import annotations

from uuid import UUID

from gateway.groups.journal_rows import Rows
from gateway.groups.journal_sheet import Happened
from storage.journal import JournalEvent, JournalMember, JournalOwnership, JournalRow

from .mixed import MACHINES, Mixed, offer
from .scene import TOPIC_NAMES, topic_id

ALL = {"t": {0, 1, 2, 3}}


class Topics:
    def name_of(self, topic_id: UUID) -> str:
        return TOPIC_NAMES[topic_id]

    def id_of(self, name: str) -> UUID | None:
        return topic_id(name)

    def partition_count_of(self, name: str) -> int:
        raise AssertionError("consumer groups own partitions, not tasks")


class Journaled(Mixed):
    """A scene that keeps the journal rows of every step."""

    def __init__(self) -> None:
        self.rows: list[JournalRow] = []
        self._made = Rows(MACHINES, Topics())
        super().__init__()

    def play(self, event: object) -> object:
        before = self.group
        answer = super().play(event)
        if self.last.facts:
            self.rows += self._made.of(Happened(before, self.group, self.last.facts, 0, self.now_ms, 1))
        return answer


def events(rows: list[JournalRow]) -> list[tuple[str, str | None]]:
    return [(row.kind, row.reason) for row in rows if isinstance(row, JournalEvent)]


def owned(rows: list[JournalRow]) -> dict[str, set[int]]:
    """Return the owners according to a reader that sees only these rows."""
    known: dict[str, set[int]] = {}
    for row in rows:
        if isinstance(row, JournalOwnership):
            held = known.setdefault(row.member_id, set())
            if row.change == "released":
                held.discard(row.partition)
            else:
                held.add(row.partition)
    return {member_id: held for member_id, held in known.items() if held}


def test_upgrade_and_downgrade_repeat_all_ownership_in_the_journal() -> None:
    scene = Journaled()
    generation = scene.classic_group({"k": ALL})
    scene.rows.clear()
    scene.enter("a")
    assert events(scene.rows)[:2] == [("loaded", "upgrade"), ("rebalance_started", "member_joined")]
    upgrade = scene.rows[0]
    assert isinstance(upgrade, JournalEvent)
    assert (upgrade.group_type, upgrade.member_count) == ("consumer", 2)
    assert owned(scene.rows) == {"k": ALL["t"]}
    sessions = {row.member_id: row.session_timeout_ms for row in scene.rows if isinstance(row, JournalMember)}
    assert sessions == {"k": 10_000, "a": 0}

    scene.join("k", offer())
    mine = scene.share("k", generation + 1)["t"]
    scene.beat("a", generation + 1)
    assert owned(scene.rows) == {"k": mine, "a": ALL["t"] - mine}

    scene.rows.clear()
    scene.beat("a", -1)
    assert events(scene.rows) == [
        ("member_left", "leave"),
        ("rebalance_started", "member_left"),
        ("loaded", "downgrade"),
        ("rebalance_started", "migrated"),
    ]
    assert owned(scene.rows) == {"k": mine}
    types = [row.group_type for row in scene.rows if isinstance(row, JournalEvent)]
    assert set(types) == {"classic"}, "a step's rows are of the group that it leaves behind"
