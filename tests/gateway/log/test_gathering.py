"""The moment at which the next commit begins, by values: times are parameters, nothing waits."""

from __future__ import annotations

from gateway.log.gathering import ENOUGH_BYTES, ENOUGH_REQUESTS, Gathering

BOUND_S = 0.001


def after(carried: int, *, left_others: bool = False) -> Gathering:
    """Return a Gathering after a commit of so many requests ended at 10 s."""
    gathering = Gathering(BOUND_S)
    gathering.ended(carried, left_others=left_others, now_s=10.0)
    return gathering


def test_the_first_commit_waits_for_nobody() -> None:
    assert Gathering(BOUND_S).deadline_s(0.0) is None


def test_one_in_flight_never_waits() -> None:
    gathering = Gathering(BOUND_S)
    for number in range(1000):
        now_s = number * BOUND_S / 2
        assert gathering.deadline_s(now_s) is None
        gathering.ended(1, left_others=False, now_s=now_s)


def test_requests_that_met_are_waited_for_no_longer_than_the_bound() -> None:
    gathering = after(3)
    assert gathering.deadline_s(10.0) == 10.0 + BOUND_S
    assert gathering.deadline_s(10.0005) == 10.0005 + BOUND_S
    assert [gathering.complete(requests, 100) for requests in (1, 2, 3, 4)] == [False, False, True, True]


def test_two_meet_where_one_came_during_the_others_commit() -> None:
    gathering = after(1, left_others=True)
    assert gathering.deadline_s(10.0) == 10.0 + BOUND_S
    assert [gathering.complete(requests, 100) for requests in (1, 2)] == [False, True]


def test_what_a_commit_left_waiting_does_not_make_the_next_wait_for_more_than_it_carried() -> None:
    assert after(3, left_others=True).complete(3, 100)


def test_enough_bytes_are_waited_with_no_longer() -> None:
    gathering = after(3)
    assert not gathering.complete(1, ENOUGH_BYTES - 1)
    assert gathering.complete(1, ENOUGH_BYTES)


def test_what_comes_after_a_silence_waits_for_nobody() -> None:
    assert after(3).deadline_s(10.0 + 2 * BOUND_S) is None


def test_who_was_alone_ends_the_waiting() -> None:
    gathering = after(3)
    gathering.ended(1, left_others=False, now_s=10.001)
    assert gathering.deadline_s(10.001) is None


def test_a_crowd_is_not_waited_for_to_the_last() -> None:
    gathering = after(10 * ENOUGH_REQUESTS)
    assert not gathering.complete(ENOUGH_REQUESTS - 1, 100)
    assert gathering.complete(ENOUGH_REQUESTS, 100)


def test_a_bound_of_zero_turns_it_off() -> None:
    gathering = Gathering(0.0)
    gathering.ended(5, left_others=True, now_s=10.0)
    assert gathering.deadline_s(10.0) is None
