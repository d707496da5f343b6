"""Tasks, which the coordinator assigns to members of a streams group.

A task is a partition of a subtopology. Its active copy processes records; standby copies, in other processes, keep the
state warm.
"""

from __future__ import annotations

from dataclasses import dataclass

Task = tuple[str, int]
"""A task: (subtopology id, partition)."""


@dataclass(frozen=True, slots=True)
class Tasks:
    active: frozenset[Task] = frozenset()
    standby: frozenset[Task] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.active or self.standby)

    def __and__(self, other: Tasks) -> Tasks:
        return Tasks(self.active & other.active, self.standby & other.standby)

    def __or__(self, other: Tasks) -> Tasks:
        return Tasks(self.active | other.active, self.standby | other.standby)

    def __sub__(self, other: Tasks) -> Tasks:
        return Tasks(self.active - other.active, self.standby - other.standby)


NO_TASKS = Tasks()
