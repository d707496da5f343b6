"""After a member has released a partition, its earlier commits decide when the coordinator assumes that the member has
stopped working on it. Tests without a Postgres.
"""

from __future__ import annotations

import uuid

import pytest

from gateway.coordinator.facts import MemberId
from gateway.groups.commit_pace import SAMPLES, SHORTEST_SLACK_S, SLACK, UNSURE_SLACK_S, CommitPaces, Pace

A, B = MemberId("a"), MemberId("b")
PARTITION = (uuid.uuid4(), 0)


def paced(*commits: tuple[float, int, float | None]) -> Pace:
    """Return the pace of a member that made these commits: (time, offset, time at which the record before the offset
    was served).
    """
    paces = CommitPaces()
    for at_s, offset, served_s in commits:
        paces.committed("g", PARTITION, A, offset, served_s, at_s)
    pace = paces.of("g", PARTITION, A)
    assert pace is not None
    return pace


def each_tenth(delay_s: float, until_s: float = 20.0) -> Pace:
    """Return the pace of a member that is served ten records a second from time 0 on, and commits each record `late_s`
    later.
    """
    numbers = range(int((until_s - delay_s) * 10) + 1)
    return paced(*((number / 10 + delay_s, number + 1, number / 10) for number in numbers))


@pytest.mark.parametrize("delay_s", [0.2, 4.0, 9.0])
def test_drain_waits_for_a_worker_pool_until_its_next_commit_is_overdue(delay_s: float) -> None:
    """The member commits each record a fixed time after its delivery. At 20 s the last record was served and the
    partition was revoked. Whenever the coordinator checks, it waits until the next commit is due.
    """
    for now_s in (20.0, 20.0 + delay_s / 2, 20.0 + delay_s):
        pace = each_tenth(delay_s, now_s)
        overdue_s = pace.overdue_s(pace.at_s - delay_s + 0.1, 20.0, 20.05)
        assert overdue_s is not None
        assert overdue_s > pace.at_s + 0.1, "the next commit is on its way"
        assert overdue_s <= pace.at_s + 0.1 + max(UNSURE_SLACK_S, SLACK * delay_s) + 1e-6


def test_drain_waits_for_a_worker_pool_through_a_lull() -> None:
    pace = each_tenth(4.0)
    overdue_s = pace.overdue_s(next_served_s=19.9, asked_s=20.0, released_s=20.05)
    assert overdue_s is not None
    assert overdue_s > 19.9 + 4.0


def test_commit_of_the_position_on_revocation_ends_the_drain() -> None:
    """The member commits every five seconds and on revocation, always up to the last processed record, as auto-commit
    does.
    """
    pace = paced((5.0, 50, 4.9), (10.0, 100, 9.9), (12.0, 120, 11.9))
    overdue_s = pace.overdue_s(next_served_s=11.95, asked_s=11.8, released_s=12.1)
    assert overdue_s is not None
    assert overdue_s < 12.0 + SHORTEST_SLACK_S + 0.2


def test_worker_pool_gets_time_for_unusually_long_work() -> None:
    """The member's earlier records took a fifth of a second each. The current one takes four seconds, on a busy
    machine."""
    pace = each_tenth(0.2, 20.0)
    overdue_s = pace.overdue_s(next_served_s=20.0, asked_s=20.1, released_s=20.15)
    assert overdue_s is not None
    assert overdue_s > 24.0


def test_first_commit_on_revocation_ends_the_drain() -> None:
    overdue_s = paced((12.0, 120, 11.9)).overdue_s(next_served_s=11.95, asked_s=11.8, released_s=12.1)
    assert overdue_s is not None
    assert overdue_s < 12.0 + SHORTEST_SLACK_S + 0.2


def test_drain_waits_for_the_next_periodic_commit() -> None:
    pace = paced((5.0, 50, 4.9), (10.0, 100, 9.9))
    overdue_s = pace.overdue_s(next_served_s=10.0, asked_s=12.0, released_s=12.1)
    assert overdue_s is not None
    assert overdue_s > 15.0


def test_drain_waits_as_long_as_a_batch_takes() -> None:
    """All records were served at time 0, and a batch takes four seconds."""
    pace = paced((4.0, 100, 0.0), (8.0, 200, 0.0), (12.0, 300, 0.0))
    overdue_s = pace.overdue_s(next_served_s=0.0, asked_s=11.0, released_s=12.1)
    assert overdue_s is not None
    assert overdue_s > 16.0


@pytest.mark.parametrize(
    "pace", [paced((5.0, 50, 4.9)), paced((5.0, 50, None), (6.0, 60, None))], ids=["one commit", "nothing served"]
)
def test_end_of_work_is_unknown_without_a_rhythm(pace: Pace) -> None:
    assert pace.overdue_s(5.0, 7.0, 7.1) is None


def test_first_commit_after_the_release_does_not_end_the_drain() -> None:
    """After the release the member's application still works on records, and the interval of its commits is unknown."""
    assert paced((12.0, 120, 11.9)).overdue_s(next_served_s=11.95, asked_s=11.8, released_s=11.9) is None
    pace = paced((12.0, 120, 11.9), (15.0, 130, 11.9))
    overdue_s = pace.overdue_s(next_served_s=11.95, asked_s=11.8, released_s=11.9)
    assert overdue_s is not None
    assert overdue_s > 18.0


def test_repeated_or_backward_commit_is_ignored_for_the_pace() -> None:
    pace = paced((5.0, 50, 4.9), (30.0, 50, None), (31.0, 60, 30.9), (90.0, 40, None))
    assert list(pace.gaps_s) == [1.0]
    assert (pace.offset, pace.at_s) == (40, 90.0)


def test_each_member_has_its_own_pace() -> None:
    paces = CommitPaces()
    paces.committed("g", PARTITION, A, 5, 0.9, 1.0)
    assert paces.of("g", PARTITION, B) is None
    paces.committed("g", PARTITION, B, 6, 8.9, 9.0)
    pace = paces.of("g", PARTITION, B)
    assert pace is not None
    assert not pace.gaps_s
    assert paces.of("g", PARTITION, A) is None
    assert paces.of("h", PARTITION, B) is None


def test_paces_are_bounded() -> None:
    paces = CommitPaces(max_partitions=2)
    for index in (0, 1, 0, 2):
        paces.committed("g", (PARTITION[0], index), A, 1, None, 1.0)
    kept = [index for index in range(3) if paces.of("g", (PARTITION[0], index), A) is not None]
    assert kept == [0, 2]
    for number in range(3 * SAMPLES):
        paces.committed("g", PARTITION, A, number, float(number), float(number))
    pace = paces.of("g", PARTITION, A)
    assert pace is not None
    assert (len(pace.delays_s), len(pace.gaps_s)) == (SAMPLES, SAMPLES)
