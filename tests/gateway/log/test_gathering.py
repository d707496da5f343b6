"""When the next commit begins. Times are parameters, so that no test waits."""

from __future__ import annotations

from gateway.log.gathering import ENOUGH_BYTES, ENOUGH_REQUESTS, Gathering

BOUND_S = 0.001
COMMIT_S = 0.0005


def after(carried: int, *, left_others: bool = False, pause_s: float = 0.0, commits: int = 50) -> Gathering:
    """Return a Gathering that has seen `commits` commits of `carried` requests each. The last commit ended at 10 s."""
    gathering = Gathering(BOUND_S)
    for number in reversed(range(commits)):
        ended_s = 10.0 - number * (COMMIT_S + pause_s)
        gathering.ended(carried, left_others=left_others, began_s=ended_s - COMMIT_S, now_s=ended_s)
    return gathering


def test_first_commit_does_not_wait() -> None:
    assert Gathering(BOUND_S).deadline_s(1, 0.0) is None


def test_one_in_flight_never_waits() -> None:
    gathering = Gathering(BOUND_S)
    for number in range(1000):
        now_s = number * BOUND_S / 2
        assert gathering.deadline_s(1, now_s) is None
        gathering.ended(1, left_others=False, began_s=now_s, now_s=now_s + BOUND_S / 4)


def test_wait_for_requests_that_met_is_bounded() -> None:
    gathering = after(3)
    assert gathering.deadline_s(1, 10.0) == 10.0 + BOUND_S
    assert gathering.deadline_s(1, 10.0005) == 10.0005 + BOUND_S
    assert [gathering.complete(requests, 100) for requests in (1, 2, 3, 4)] == [False, False, True, True]


def test_request_during_another_ones_commit_counts_as_met() -> None:
    gathering = after(1, left_others=True)
    assert gathering.deadline_s(1, 10.0) == 10.0 + BOUND_S
    assert [gathering.complete(requests, 100) for requests in (1, 2)] == [False, True]


def test_requests_left_out_do_not_raise_the_expected_number() -> None:
    assert after(3, left_others=True).complete(3, 100)


def test_enough_bytes_end_the_wait() -> None:
    gathering = after(3)
    assert not gathering.complete(1, ENOUGH_BYTES - 1)
    assert gathering.complete(1, ENOUGH_BYTES)


def test_request_after_a_silence_does_not_wait() -> None:
    assert after(3).deadline_s(1, 10.0 + 2 * BOUND_S) is None


def test_commit_does_not_wait_for_requests_that_arrive_seldom() -> None:
    assert after(1, left_others=True, pause_s=COMMIT_S / 4).deadline_s(1, 10.0) is not None
    assert after(1, left_others=True, pause_s=COMMIT_S).deadline_s(1, 10.0) is None


def test_commit_waits_for_as_many_as_arrive_in_one_and_a_half_commits() -> None:
    gathering = after(4, pause_s=COMMIT_S)
    assert [gathering.deadline_s(requests, 10.0) is not None for requests in (0, 1, 2, 3)] == [False, True, True, True]


def test_silence_does_not_count_as_the_pace_of_requests() -> None:
    assert after(3, pause_s=0.99 * BOUND_S).deadline_s(1, 10.0) is None
    assert after(3, pause_s=1.01 * BOUND_S).deadline_s(1, 10.0) is not None


def test_one_quick_or_slow_commit_does_not_part_clients_that_meet() -> None:
    for duration_s in (COMMIT_S / 2, 10 * COMMIT_S):
        gathering = after(5, pause_s=0.7 * COMMIT_S)
        assert gathering.deadline_s(1, 10.0) is not None
        ended_s = 10.0 + 0.7 * COMMIT_S + duration_s
        gathering.ended(5, left_others=False, began_s=ended_s - duration_s, now_s=ended_s)
        assert gathering.deadline_s(1, ended_s) is not None


def test_lone_request_ends_the_waiting() -> None:
    gathering = after(3)
    gathering.ended(1, left_others=False, began_s=10.0005, now_s=10.001)
    assert gathering.deadline_s(1, 10.001) is None


def test_commit_does_not_wait_for_the_last_of_many() -> None:
    gathering = after(10 * ENOUGH_REQUESTS)
    assert not gathering.complete(ENOUGH_REQUESTS - 1, 100)
    assert gathering.complete(ENOUGH_REQUESTS, 100)


def test_bound_of_zero_disables_waiting() -> None:
    gathering = Gathering(0.0)
    for now_s in (9.0, 10.0):
        gathering.ended(5, left_others=True, began_s=now_s - 1, now_s=now_s)
    assert gathering.deadline_s(1, 10.0) is None
