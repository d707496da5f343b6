"""The 33 scenarios of Apache Iggy's cooperative reassignment, in its order, for any kind of readers.

The one idea: each expected outcome is stated once. The tests check it with the coordinator alone and with a real
gateway. Kafka never deletes single partitions. So if Iggy's scenario deletes partitions, ours deletes a topic. Both
remove silent clients. The readers themselves check in all scenarios what two members may not own at once
(`readers.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import pytest

from gateway.coordinator.handoff import FORCED, HandoffEnd
from tests.readers import Readers


class Stage(Protocol):
    """Makes the readers of one group. Each topic has `partitions` partitions. If the scenario lets readers die, they
    are removed after a short silence.
    """

    def __call__(
        self, partitions: int, *, topics: tuple[str, ...] = ..., timeout_ms: int = ..., mortal: bool = ...
    ) -> Readers: ...


Scenario = Callable[[Stage], None]
SCENARIOS: list[Any] = []


def scenario(number: str) -> Callable[[Scenario], Scenario]:
    def add(played: Scenario) -> Scenario:
        SCENARIOS.append(pytest.param(played, id=f"{number}-{played.__name__}"))
        return played

    return add


def holding(stage: Stage, partitions: int = 3, **given: Any) -> Readers:
    """Let reader `a` read one record of each partition without a commit. Then let reader `b` join and wait."""
    scene = stage(partitions, **given)
    scene.come("a")
    scene.produce()
    assert len(scene.poll("a")) == partitions
    scene.come("b")
    scene.settle(waiting=partitions // 2)
    assert not scene.poll("b")
    return scene


def finished(scene: Readers) -> None:
    """Let every reader read and commit to the end. Then assert that the shares are even and that no record was read
    twice.
    """
    scene.settle(work=True)
    scene.produce()
    scene.settle(work=True)
    scene.is_even()
    assert {(each.partition, each.offset) for each in scene.delivered} == {
        (partition, offset) for partition, end in scene.ends.items() for offset in range(end)
    }
    assert not scene.duplicates()
    assert not FORCED & scene.ended


def stale_trio(stage: Stage) -> Readers:
    """Make three silent readers, one of which has read without a commit."""
    scene = stage(3, mortal=True)
    scene.come("a", "b", "c")
    scene.settle()
    scene.produce()
    assert len(scene.poll("a")) == 1
    scene.die("a", "b", "c")
    return scene


@scenario("01")
def those_who_come_after_the_stale_have_one_each(stage: Stage) -> None:
    scene = stale_trio(stage)
    scene.come("d", "e", "f")
    scene.settle()
    scene.is_even()
    assert [len(scene.poll(name)) for name in "def"] == [1, 1, 1], (
        "also what the dead one had read: nobody waits for it"
    )
    assert not FORCED & scene.ended


@scenario("02")
def a_newcomer_reshuffles_nobody(stage: Stage) -> None:
    scene = stage(3)
    scene.come("a", "b")
    scene.settle()
    before = {name: set(scene.owned(name)) for name in "ab"}
    scene.come("c")
    scene.settle()
    scene.is_even()
    assert all(scene.owned(name) <= before[name] for name in "ab"), "nobody is given another's"
    assert sorted(len(before[name] - scene.owned(name)) for name in "ab") == [0, 1]


@scenario("03")
def what_is_revoked_is_not_read_on(stage: Stage) -> None:
    scene = holding(stage)
    scene.produce()
    assert 1 <= len(scene.poll("a")) < 3


@scenario("04")
def no_record_is_lost_when_partitions_come_under_readers(stage: Stage) -> None:
    scene = stage(3)
    scene.come("a", "b")
    scene.settle()
    for round_ in range(6):
        scene.produce()
        scene.poll("a", "b")
        if round_ == 2:
            scene.grow(t=6)
        scene.beat("a", "b")
    finished(scene)


@scenario("05")
def partitions_come_one_goes_another_comes(stage: Stage) -> None:
    scene = stage(3, mortal=True)
    scene.come("a", "b")
    scene.settle()
    scene.grow(t=6)
    scene.settle()
    scene.die("b")
    scene.settle()
    assert len(scene.owned("a")) == 6
    scene.come("c")
    scene.settle()
    scene.is_even()
    scene.produce()
    assert len(scene.poll("a")) == len(scene.poll("c")) == 3


@scenario("06")
def a_topic_goes_while_three_read(stage: Stage) -> None:
    scene = stage(3, topics=("t", "u"))
    scene.come("a", "b", "c")
    scene.settle()
    scene.produce()
    scene.poll("a", "b", "c")
    scene.grow(t=3)
    scene.rest()
    scene.commit("a", "b", "c")
    scene.settle()
    scene.is_even()
    assert [len(scene.owned(name)) for name in "abc"] == [1, 1, 1]


@scenario("07")
def shares_stay_even_through_six_joins(stage: Stage) -> None:
    scene = stage(6)
    for name in "abcdef":
        scene.come(name)
        scene.settle(work=True)
        scene.is_even()
    scene.produce()
    assert [len(scene.poll(name)) for name in "abcdef"] == [1] * 6


@scenario("08")
def who_joins_after_partitions_came_has_its_share(stage: Stage) -> None:
    scene = stage(3)
    scene.come("a", "b")
    scene.settle()
    scene.grow(t=6)
    scene.come("c")
    scene.settle()
    scene.is_even()


@scenario("09")
def partitions_come_while_both_have_work(stage: Stage) -> None:
    scene = stage(3)
    scene.come("a", "b")
    scene.settle()
    scene.produce()
    scene.poll("a", "b")
    scene.grow(t=6)
    scene.produce()
    scene.rest()
    scene.poll("a", "b")
    assert all(len(scene.readers_of(partition)) == 1 for partition in scene.partitions())
    finished(scene)


@scenario("10")
def a_topic_goes_with_work_that_is_not_committed(stage: Stage) -> None:
    scene = stage(3, topics=("t", "u"))
    scene.come("a", "b")
    scene.settle()
    scene.produce()
    scene.poll("a", "b")
    scene.grow(t=3)
    scene.rest()
    scene.poll("a", "b")
    assert not scene.duplicates(), "what moves on account of it waits, too"
    scene.commit("a", "b")
    scene.settle()
    scene.is_even()
    scene.produce()
    assert scene.poll("a")
    assert scene.poll("b")
    assert not scene.duplicates()


@scenario("11")
def partitions_come_and_come_and_a_member_does(stage: Stage) -> None:
    scene = stage(3)
    scene.come("a", "b")
    scene.grow(t=6)
    scene.grow(t=9)
    scene.come("c")
    scene.settle()
    scene.is_even()
    assert len(scene.partitions()) == 9


@scenario("12")
def three_have_one_each_and_then_two(stage: Stage) -> None:
    scene = stage(3)
    scene.come("a", "b", "c")
    scene.settle()
    scene.grow(t=6)
    scene.settle()
    scene.is_even()
    assert [len(scene.owned(name)) for name in "abc"] == [2, 2, 2]


@scenario("13")
def three_have_two_each_and_then_one(stage: Stage) -> None:
    scene = stage(3, topics=("t", "u"))
    scene.come("a", "b", "c")
    scene.settle()
    assert [len(scene.owned(name)) for name in "abc"] == [2, 2, 2]
    scene.grow(u=3)
    scene.settle()
    scene.is_even()


@scenario("14")
def partitions_come_while_others_are_waited_for(stage: Stage) -> None:
    scene = holding(stage)
    scene.grow(t=6)
    scene.rest()
    assert not scene.duplicates()
    scene.commit("a")
    scene.settle()
    scene.is_even()
    assert len(scene.owned("a")) == len(scene.owned("b")) == 3
    finished(scene)


@scenario("15")
def who_commits_nothing_is_waited_for_as_long_as_is_set(stage: Stage) -> None:
    timeout_ms = 3_000
    scene = holding(stage, timeout_ms=timeout_ms)
    (moved,) = scene.partitions() - scene.owned("a")
    scene.outlast()
    scene.is_even()
    before, after = scene.intervals[moved]
    assert (before.reader, after.reader) == ("a", "b")
    assert before.ended_ms is not None
    assert after.began_ms - before.ended_ms >= timeout_ms
    assert scene.poll("b"), "it reads again what the other has not committed"
    assert scene.ended == {HandoffEnd.TIMEOUT}


@scenario("16")
def after_the_stale_one_record_is_read_by_one(stage: Stage) -> None:
    scene = stale_trio(stage)
    scene.come("d", "e", "f")
    for name in "fed":
        scene.beat(name)
        scene.poll(*"def")
    scene.rest()
    scene.poll(*"def")
    new = [each for each in scene.delivered if each.reader in "def"]
    assert len(new) == len({(each.partition, each.offset) for each in new}) == 3


@scenario("17")
def who_lost_everything_and_comes_back_shares_with_nobody(stage: Stage) -> None:
    scene = stage(3, mortal=True)
    scene.come("a", "b", "c")
    scene.settle()
    scene.come("a", "b", "c")
    scene.settle()
    scene.is_even()


@scenario("18")
def what_one_holds_nobody_else_reads(stage: Stage) -> None:
    scene = stage(3)
    scene.come("a")
    scene.produce(only=[("t", 2)])
    assert scene.poll("a") == {("t", 2)}
    scene.come("b", "c")
    for _ in range(3):
        scene.rest()
        assert not scene.poll("b", "c")
    scene.commit("a")
    finished(scene)


@scenario("19")
def what_is_committed_as_it_is_read_goes_at_once(stage: Stage) -> None:
    scene = stage(3)
    scene.come("a")
    scene.produce()
    assert len(scene.poll("a")) == 3
    scene.commit("a")
    scene.come("b")
    scene.settle()
    scene.is_even()
    assert scene.ended == {HandoffEnd.DRAINED}


@scenario("20")
def what_was_never_read_goes_at_once(stage: Stage) -> None:
    scene = stage(3)
    for name in "abc":
        scene.come(name)
        scene.settle()
        scene.is_even()
    assert scene.ended == {HandoffEnd.NEVER_FETCHED}


@scenario("21")
def a_source_that_leaves_is_not_waited_for(stage: Stage) -> None:
    scene = holding(stage)
    scene.leave("a")
    scene.settle()
    assert len(scene.poll("b")) == 3
    assert HandoffEnd.SOURCE_LEFT in scene.ended


@scenario("22")
def members_come_one_by_one_and_every_record_is_read_once(stage: Stage) -> None:
    scene = stage(3)
    scene.come("a")
    scene.produce(5)
    assert len(scene.poll("a", at_most=1)) == 3
    scene.come("b")
    scene.rest()
    scene.come("c")
    scene.rest()
    scene.commit("a")
    scene.settle(work=True)
    scene.is_even()
    assert len(scene.delivered) == 15
    assert not scene.duplicates()


@scenario("23")
def a_target_waits_for_the_commit(stage: Stage) -> None:
    scene = holding(stage)
    gone = scene.partitions() - scene.owned("a")
    (one,) = gone
    scene.commit("a", only=scene.owned("a"))
    scene.settle(waiting=1)
    assert not scene.poll("b"), "what is committed is of other partitions"
    scene.commit("a", only=gone)
    scene.settle()
    scene.produce()
    assert scene.poll("b") == {one}
    assert scene.poll("a") == scene.partitions() - gone
    assert not scene.duplicates()


@scenario("24")
def a_target_that_leaves_gives_its_place_back(stage: Stage) -> None:
    scene = holding(stage)
    scene.leave("b")
    scene.settle()
    scene.produce()
    assert len(scene.poll("a")) == 3
    assert HandoffEnd.TARGET_LEFT in scene.ended


@scenario("25")
def three_come_at_once(stage: Stage) -> None:
    scene = stage(3)
    scene.come("a", "b", "c")
    scene.settle()
    scene.is_even()


def whoever_comes_in_a_targets_place_waits_as_it_did(stage: Stage, *, name: str) -> None:
    """The new reader may also have the same id as the reader that left."""
    scene = holding(stage)
    scene.leave("b")
    scene.come(name)
    scene.settle(waiting=1)
    assert not scene.poll(name)
    scene.commit("a")
    finished(scene)


for name in "cb":
    played = partial(whoever_comes_in_a_targets_place_waits_as_it_did, name=name)
    SCENARIOS.append(pytest.param(played, id=f"26-whoever_comes_in_a_targets_place_waits_as_it_did-{name}"))


@scenario("27")
def one_that_leaves_ends_nobody_elses_wait(stage: Stage) -> None:
    scene = holding(stage)
    scene.come("c")
    scene.settle(waiting=2)
    scene.leave("c")
    scene.rest()
    assert not scene.poll("b")
    scene.commit("a")
    scene.settle()
    scene.is_even()
    finished(scene)


def shares_are_even(stage: Stage, *, partitions: int, waves: tuple[int, ...], shares: list[int]) -> None:
    """All members of a wave join at once. The earlier readers have read records that they have not committed yet."""
    scene = stage(partitions)
    for wave, count in enumerate(waves):
        scene.produce()
        scene.poll(*scene.readers)
        scene.come(*(f"{wave}-{number}" for number in range(count)))
    finished(scene)
    assert sorted(len(each.owned) for each in scene.readers.values()) == shares


for number, partitions, waves, shares in (
    ("28", 16, (16,), [1] * 16),
    ("29", 12, (4,), [3] * 4),
    ("30", 10, (4,), [2, 2, 3, 3]),
    ("31", 16, (2, 6), [2] * 8),
    ("32", 24, (8,), [3] * 8),
):
    played = partial(shares_are_even, partitions=partitions, waves=waves, shares=shares)
    SCENARIOS.append(pytest.param(played, id=f"{number}-shares_are_even"))


@scenario("33")
def four_to_two_to_four_over_sixteen_partitions(stage: Stage) -> None:
    scene = stage(16)
    scene.come(*"abcd")
    finished(scene)
    scene.produce()
    scene.poll(*"abcd")
    scene.commit(*"cd")
    scene.leave("c", "d")
    finished(scene)
    scene.produce()
    scene.poll(*"ab")
    scene.come("e", "f")
    finished(scene)
    assert [len(scene.owned(name)) for name in "abef"] == [4, 4, 4, 4]
