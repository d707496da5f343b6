"""The pace at which members commit. It shows when a member has stopped working on a partition that it has released.

The one idea: served is not processed. A client that revokes a partition discards the records that it has prefetched, so
its commits never reach the end of the records it was served. Two durations form the member's pace. The delay is the
time from serving a record to its commit. The gap is the time between two commits of the partition. If the commit of the
next record is overdue by both, the member does not work on that record.

A commit between the request to revoke and the release most likely covers all records that the member has processed.
Then a gap longer than the delay counts as long as the delay: an application that commits everything it has processed
every five seconds needs no such long wait. A commit after the release shows that the application still works on the
partition.

A member that has never committed has no pace. Neither has a member whose fetches this node does not see. Paces are kept
in memory only.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from uuid import UUID

from gateway.coordinator.facts import MemberId

SAMPLES = 8
"""Commits of a partition whose delays and gaps are remembered. The longest delay and the longest gap decide."""
MAX_PARTITIONS = 20_000
"""Partitions of all groups whose paces are remembered. The one with the oldest commit is forgotten first."""
SHORTEST_SLACK_S = 1.0
UNSURE_SLACK_S = 5.0
"""Shortest slack if the member did not commit between the request to revoke and the release. Then the application may
still be at work."""
SLACK = 1.0
"""Tolerance for a late commit, as a multiple of its usual delay or gap."""


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
        """Return the time at which the commit of the next record is overdue; None if it is unknown. That record was
        served at `next_served_s`. The member was asked to revoke the partition at `asked_s`, if that is known."""
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
        """Note that the member has committed `offset`. It was served the record before that offset at `last_served_s`,
        if that is known."""
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
