"""How members commit, and from that when one has stopped working on a partition that it has released.

The one idea: served is not processed. A client throws away what it has prefetched when it revokes a partition, so its
commits never reach the end of what it was served. Whether more commits are to come is known by its own pace: how long
after a record was served the commit of that record came (the delay), and how long the commits of the partition are
apart (the gap). If the next uncommitted record is overdue by both, the member does not work on it.

A last commit between the request to revoke and the release is most likely one of the whole position. Then the gap does
not count beyond the delay: an application that commits every five seconds all that it has processed need not be waited
for that long. A commit after the release shows that the application works on what it has released.

A member that has never committed has no pace, and neither has one whose fetches this node does not know. Memory only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from uuid import UUID

from gateway.coordinator.facts import MemberId

SAMPLES = 8
"""Commits of a partition of which delays and gaps are remembered; the longest count."""
MAX_PARTITIONS = 20_000
"""Partitions of all groups. The one committed longest ago is forgotten first."""
SHORTEST_SLACK_S = 1.0
UNSURE_SLACK_S = 5.0
"""The shortest slack without a commit between the request to revoke and the release. The application may be at work."""
SLACK = 1.0
"""How late a commit may be, as a part of its usual delay or gap."""


def _samples() -> deque[float]:
    return deque(maxlen=SAMPLES)


@dataclass(slots=True)
class Pace:
    """Commits of one partition by one member."""

    member_id: MemberId
    offset: int
    at_s: float
    delays_s: deque[float] = field(default_factory=_samples)
    gaps_s: deque[float] = field(default_factory=_samples)

    def overdue_s(self, next_served_s: float, asked_s: float | None, released_s: float) -> float | None:
        """When the commit of the next record is overdue, which was served at `next_served_s`. None: that is unknown.
        `asked_s`: when the member was asked to revoke the partition, if that is known."""
        if not self.delays_s:
            return None
        delay_s = max(self.delays_s)
        shortest_s = UNSURE_SLACK_S
        if asked_s is not None and asked_s <= self.at_s <= released_s:
            shortest_s = SHORTEST_SLACK_S
            gap_s = min(max(self.gaps_s, default=delay_s), delay_s)
        elif self.gaps_s:
            gap_s = max(self.gaps_s)
        else:
            return None
        expected_s = max(next_served_s + delay_s, self.at_s + gap_s)
        return expected_s + max(shortest_s, SLACK * max(delay_s, gap_s))


class CommitPaces:
    """The paces of commits in those groups of this node in which a new owner may wait for the old owner."""

    def __init__(self, max_partitions: int = MAX_PARTITIONS) -> None:
        self._max_partitions = max_partitions
        self._paces: OrderedDict[tuple[str, UUID, int], Pace] = OrderedDict()

    def of(self, group_id: str, partition: tuple[UUID, int], member_id: MemberId) -> Pace | None:
        pace = self._paces.get((group_id, *partition))
        return pace if pace is not None and pace.member_id == member_id else None

    def committed(
        self,
        group_id: str,
        partition: tuple[UUID, int],
        member_id: MemberId,
        offset: int,
        last_served_s: float | None,
        now_s: float,
    ) -> None:
        """The member has committed `offset`. `last_served_s`: when it was served the record before, if known."""
        key = (group_id, *partition)
        pace = self._paces.get(key)
        if pace is None or pace.member_id != member_id:
            pace = self._paces[key] = Pace(member_id, offset, now_s)
        else:
            if offset > pace.offset:
                pace.gaps_s.append(now_s - pace.at_s)
            pace.offset, pace.at_s = offset, now_s
        self._paces.move_to_end(key)
        if last_served_s is not None:
            pace.delays_s.append(now_s - last_served_s)
        if len(self._paces) > self._max_partitions:
            self._paces.popitem(last=False)
