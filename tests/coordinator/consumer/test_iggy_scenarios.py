"""The 33 scenarios of Apache Iggy's cooperative reassignment, in its order, with readers of a consumer group.

What decides is the coordinator alone, so all of them can be played without sockets; that no partition has two owners at
once is checked with every answer (`readers.py`). Kafka's partitions are never deleted: where Iggy deletes some, a topic
goes. Its clients are thrown out for their silence, as are these.
"""

from __future__ import annotations

from typing import Any

import pytest

from gateway.coordinator.handoff import FORCED, HandoffEnd

from .readers import Readers


def holding(partitions: int = 3, **given: Any) -> Readers:
    """`a` has read a record of each partition and committed nothing; `b` has joined, and waits."""
    scene = Readers(partitions, **given)
    scene.come("a")
    scene.produce()
    assert len(scene.poll("a")) == partitions
    scene.come("b")
    scene.settle()
    assert scene.pending
    assert not scene.poll("b")
    return scene


def finished(scene: Readers) -> None:
    """Everyone reads and commits to the end: shares are even, and nothing was read twice."""
    scene.settle(work=True)
    scene.produce()
    scene.settle(work=True)
    scene.is_even()
    assert {(partition, offset) for partition, offset, _ in scene.delivered} == {
        (partition, offset) for partition, end in scene.ends.items() for offset in range(end)
    }
    assert not scene.duplicates()
    assert not FORCED & set(scene.ended)


def stale_trio() -> Readers:
    """Three readers that say nothing any more, one of which has read without a commit."""
    scene = Readers(3)
    scene.come("a", "b", "c")
    scene.settle()
    scene.produce()
    scene.poll("a")
    scene.die("a", "b", "c")
    assert not scene.group.members
    return scene


def test_01_those_who_come_after_the_stale_have_one_each() -> None:
    scene = stale_trio()
    scene.come("d", "e", "f")
    scene.settle()
    scene.is_even()
    assert [len(scene.poll(name)) for name in "def"] == [1, 1, 1], (
        "also what the dead one had read: nobody waits for it"
    )


def test_02_a_newcomer_reshuffles_nobody() -> None:
    scene = Readers(3)
    scene.come("a", "b")
    scene.settle()
    before = {name: set(scene.owned(name)) for name in "ab"}
    scene.come("c")
    scene.settle()
    scene.is_even()
    assert all(scene.owned(name) <= before[name] for name in "ab"), "nobody is given another's"
    assert sorted(len(before[name] - scene.owned(name)) for name in "ab") == [0, 1]


def test_03_what_is_revoked_is_not_read_on() -> None:
    scene = holding()
    scene.produce()
    assert 1 <= len(scene.poll("a")) < 3


def test_04_no_record_is_lost_when_partitions_come_under_readers() -> None:
    scene = Readers(3)
    scene.come("a", "b")
    scene.settle()
    for round_ in range(6):
        scene.produce()
        scene.poll("a", "b")
        if round_ == 2:
            scene.grow(t=6)
        scene.beat("a", "b")
    finished(scene)


def test_05_partitions_come_one_goes_another_comes() -> None:
    scene = Readers(3)
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


def test_06_a_topic_goes_while_three_read() -> None:
    scene = Readers(3, topics=("t", "u"))
    scene.come("a", "b", "c")
    scene.settle()
    scene.produce()
    scene.poll("a", "b", "c")
    scene.grow(t=3)
    scene.settle()
    scene.commit("a", "b", "c")
    scene.settle()
    scene.is_even()
    assert [len(scene.owned(name)) for name in "abc"] == [1, 1, 1]


def test_07_shares_stay_even_through_six_joins() -> None:
    scene = Readers(6)
    for name in "abcdef":
        scene.come(name)
        scene.settle(work=True)
        scene.is_even()
    scene.produce()
    assert [len(scene.poll(name)) for name in "abcdef"] == [1] * 6


def test_08_who_joins_after_partitions_came_has_its_share() -> None:
    scene = Readers(3)
    scene.come("a", "b")
    scene.settle()
    scene.grow(t=6)
    scene.come("c")
    scene.settle()
    scene.is_even()


def test_09_partitions_come_while_both_have_work() -> None:
    scene = Readers(3)
    scene.come("a", "b")
    scene.settle()
    scene.produce()
    scene.poll("a", "b")
    scene.grow(t=6)
    scene.produce()
    scene.settle()
    scene.poll("a", "b")
    assert all(len(scene.readers_of(partition)) == 1 for partition in scene.partitions())
    finished(scene)


def test_10_a_topic_goes_with_work_that_is_not_committed() -> None:
    scene = Readers(3, topics=("t", "u"))
    scene.come("a", "b")
    scene.settle()
    scene.produce()
    scene.poll("a", "b")
    scene.grow(t=3)
    scene.settle()
    scene.poll("a", "b")
    assert not scene.duplicates(), "what moves on account of it waits, too"
    scene.commit("a", "b")
    scene.settle()
    scene.is_even()
    scene.produce()
    assert scene.poll("a")
    assert scene.poll("b")
    assert not scene.duplicates()


def test_11_partitions_come_and_come_and_a_member_does() -> None:
    scene = Readers(3)
    scene.come("a", "b")
    scene.grow(t=6)
    scene.grow(t=9)
    scene.come("c")
    scene.settle()
    scene.is_even()
    assert len(scene.partitions()) == 9


def test_12_three_have_one_each_and_then_two() -> None:
    scene = Readers(3)
    scene.come("a", "b", "c")
    scene.settle()
    scene.grow(t=6)
    scene.settle()
    scene.is_even()
    assert [len(scene.owned(name)) for name in "abc"] == [2, 2, 2]


def test_13_three_have_two_each_and_then_one() -> None:
    scene = Readers(3, topics=("t", "u"))
    scene.come("a", "b", "c")
    scene.settle()
    assert [len(scene.owned(name)) for name in "abc"] == [2, 2, 2]
    scene.grow(u=3)
    scene.settle()
    scene.is_even()


def test_14_partitions_come_while_others_are_waited_for() -> None:
    scene = holding()
    scene.grow(t=6)
    scene.settle()
    assert not scene.duplicates()
    scene.commit("a")
    scene.settle()
    scene.is_even()
    assert len(scene.owned("a")) == len(scene.owned("b")) == 3
    finished(scene)


def test_15_who_commits_nothing_is_waited_for_as_long_as_is_set() -> None:
    scene = holding(timeout_ms=3_000)
    scene.wait(2_000)
    assert not scene.owned("b")
    scene.wait(4_000)
    scene.is_even()
    assert scene.poll("b"), "it reads again what the other has not committed"
    assert set(scene.ended) == {HandoffEnd.TIMEOUT}


def test_16_after_the_stale_one_record_is_read_by_one() -> None:
    scene = stale_trio()
    scene.come("d", "e", "f")
    for name in "fed":
        scene.beat(name)
        scene.poll(*"def")
    scene.settle()
    scene.poll(*"def")
    new = [each for each in scene.delivered if each[2] in "def"]
    assert len(new) == len({(partition, offset) for partition, offset, _ in new}) == 3


def test_17_who_lost_everything_and_comes_back_shares_with_nobody() -> None:
    scene = Readers(3)
    scene.come("a", "b", "c")
    scene.settle()
    scene.come("a", "b", "c")
    scene.settle()
    scene.is_even()


def test_18_what_one_holds_nobody_else_reads() -> None:
    scene = Readers(3)
    scene.come("a")
    scene.ends["t", 2] = 1
    assert scene.poll("a") == {("t", 2)}
    scene.come("b", "c")
    for _ in range(5):
        scene.settle()
        assert not scene.poll("b", "c")
    scene.commit("a")
    finished(scene)


def test_19_what_is_committed_as_it_is_read_goes_at_once() -> None:
    scene = Readers(3)
    scene.come("a")
    scene.produce()
    scene.poll("a")
    scene.commit("a")
    scene.come("b")
    scene.settle()
    scene.is_even()
    assert set(scene.ended) == {HandoffEnd.DRAINED}


def test_20_what_was_never_read_goes_at_once() -> None:
    scene = Readers(3)
    for name in "abc":
        scene.come(name)
        scene.settle()
        scene.is_even()
    assert set(scene.ended) == {HandoffEnd.NEVER_FETCHED}


def test_21_a_source_that_leaves_is_not_waited_for() -> None:
    scene = holding()
    scene.leave("a")
    scene.settle()
    assert len(scene.poll("b")) == 3
    assert HandoffEnd.SOURCE_LEFT in scene.ended


def test_22_members_come_one_by_one_and_every_record_is_read_once() -> None:
    scene = Readers(3)
    scene.come("a")
    scene.produce(5)
    scene.poll("a", at_most=1)
    scene.come("b")
    scene.settle()
    scene.come("c")
    scene.settle()
    scene.commit("a")
    scene.settle(work=True)
    scene.is_even()
    assert len(scene.delivered) == 15
    assert not scene.duplicates()


def test_23_a_target_waits_for_the_commit() -> None:
    scene = holding()
    gone = scene.partitions() - scene.owned("a")
    (one,) = gone
    scene.commit("a", only=scene.owned("a"))
    scene.settle()
    assert not scene.poll("b"), "what is committed is of other partitions"
    scene.commit("a", only=gone)
    scene.settle()
    scene.produce()
    assert scene.poll("b") == {one}
    assert scene.poll("a") == scene.partitions() - gone
    assert not scene.duplicates()


def test_24_a_target_that_leaves_gives_its_place_back() -> None:
    scene = holding()
    scene.leave("b")
    scene.settle()
    scene.produce()
    assert len(scene.poll("a")) == 3
    assert HandoffEnd.TARGET_LEFT in scene.ended


def test_25_three_come_at_once() -> None:
    scene = Readers(3)
    scene.come("a", "b", "c")
    scene.settle()
    scene.is_even()


@pytest.mark.parametrize("name", ["c", "b"])
def test_26_whoever_comes_in_a_targets_place_waits_as_it_did(name: str) -> None:
    """Also under the very id of the one that left."""
    scene = holding()
    scene.wait(3_000)
    scene.leave("b")
    scene.come(name)
    scene.settle()
    assert not scene.poll(name)
    scene.commit("a")
    finished(scene)


def test_27_one_that_leaves_ends_nobody_elses_wait() -> None:
    scene = holding()
    scene.come("c")
    scene.settle()
    assert scene.pending == 2
    scene.leave("c")
    scene.settle()
    assert not scene.poll("b")
    scene.commit("a")
    scene.settle()
    scene.is_even()
    finished(scene)


@pytest.mark.parametrize(
    ("partitions", "waves", "shares"),
    [
        pytest.param(16, (16,), [1] * 16, id="28"),
        pytest.param(12, (4,), [3] * 4, id="29"),
        pytest.param(10, (4,), [2, 2, 3, 3], id="30"),
        pytest.param(16, (2, 6), [2] * 8, id="31"),
        pytest.param(24, (8,), [3] * 8, id="32"),
    ],
)
def test_28_to_32_shares_are_even(partitions: int, waves: tuple[int, ...], shares: list[int]) -> None:
    """Each wave comes at once, while those before it have read what they have not committed yet."""
    scene = Readers(partitions)
    for wave, count in enumerate(waves):
        scene.produce()
        scene.poll(*scene.readers)
        scene.come(*(f"{wave}-{number}" for number in range(count)))
    finished(scene)
    assert sorted(len(each.owned) for each in scene.readers.values()) == shares


def test_33_four_to_two_to_four_over_sixteen_partitions() -> None:
    scene = Readers(16)
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
