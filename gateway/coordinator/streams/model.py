"""The vocabulary of the streams group coordinator (KIP-1071): members as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gateway.coordinator.facts import MemberId
from gateway.coordinator.streams.tasks import NO_TASKS, Tasks

JOIN_EPOCH = 0
LEAVE_EPOCH = -1


class MemberState(Enum):
    STABLE = "stable"
    UNREVOKED = "unrevoked_tasks"
    """Has tasks that it is to let go of, and has not said yet that it did."""
    UNRELEASED = "unreleased_tasks"
    """Awaits tasks that somebody else has not let go of."""


@dataclass(frozen=True, slots=True)
class StreamsMember:
    member_id: MemberId
    process_id: str = ""
    """Members of one process share its state directory: no two of them may hold the same task."""
    member_epoch: int = 0
    previous_member_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: Tasks = NO_TASKS
    """What it was told that it may own."""
    pending_revocation: Tasks = NO_TASKS
    """What it was told to let go of, and may own still."""

    @property
    def held(self) -> Tasks:
        return self.assigned | self.pending_revocation
