"""Placement of new topics' replicas: leaders and followers are spread evenly over racks, and live nodes come first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.spreading import Spread, in_turn

RACKS = st.sampled_from([None, "a", "b", "c"])


def spread_over(*racks: str | None, fenced: int = 0) -> Spread:
    """Return nodes numbered from 1. The last `fenced` of them are not alive."""
    nodes = dict(enumerate(racks, 1))
    alive = len(nodes) - fenced
    return Spread(
        {node_id: rack for node_id, rack in nodes.items() if node_id <= alive},
        {node_id: rack for node_id, rack in nodes.items() if node_id > alive},
    )


def test_examples_of_spread_replicas() -> None:
    spread = spread_over(None, None, None)
    assert [spread.replicas(place, 2) for place in range(7)] == [
        *((1, 2), (2, 3), (3, 1)),
        *((1, 3), (2, 1), (3, 2)),
        (1, 2),
    ]
    assert [spread.replicas(place, 1) for place in range(4)] == [(1,), (2,), (3,), (1,)]
    assert spread.replicas(4, 3) == (2, 1, 3)
    assert [spread.place_of(leader) for leader in (3, 1, 9)] == [2, 0, 0]
    assert [spread_over(None).replicas(place, 1) for place in range(3)] == [(1,)] * 3


def test_racks_take_turns() -> None:
    assert in_turn({1: "b", 2: "a", 3: None, 4: "a", 5: "a"}) == [3, 2, 1, 4, 5]
    spread = spread_over("a", "a", "b", "b", "c", "c")
    assert [spread.replicas(place, 3) for place in range(6)] == [
        *((1, 3, 5), (3, 5, 2), (5, 2, 4)),
        *((2, 4, 6), (4, 6, 1), (6, 1, 3)),
    ]
    assert spread_over("a", "a", "b").replicas(0, 3) == (1, 3, 2), "a second of a rack comes when there is no other"


def test_node_that_is_not_alive_is_the_last_replica() -> None:
    spread = spread_over(None, None, None, fenced=1)
    assert len(spread) == 2
    assert [spread.replicas(place, 3) for place in range(4)] == [(1, 2, 3), (2, 1, 3), (1, 2, 3), (2, 1, 3)]
    assert {spread.replicas(place, 2) for place in range(10)} == {(1, 2), (2, 1)}
    assert spread_over("a", "a", "b", fenced=1).replicas(0, 2) == (1, 3), "but for another rack"


@pytest.mark.parametrize("nodes", [2, 3, 4, 7])
def test_leadership_of_a_lost_node_is_spread_evenly(nodes: int) -> None:
    spread = spread_over(*[None] * nodes)
    partitions = [spread.replicas(place, 2) for place in range(nodes * (nodes - 1) * 3)]
    heirs = Counter(followers for leader, followers in partitions if leader == 1)
    assert heirs == dict.fromkeys(range(2, nodes + 1), 3)


@given(
    st.lists(RACKS, min_size=1, max_size=9),
    st.integers(0, 3),
    st.integers(1, 9),
    st.integers(0, 50),
    st.integers(1, 60),
)
def test_leaders_differ_by_one_and_racks_are_used(
    racks: list[str | None], fenced: int, factor: int, start: int, count: int
) -> None:
    fenced = min(fenced, len(racks) - 1)
    factor = min(factor, len(racks))
    alive = len(racks) - fenced
    spread = spread_over(*racks, fenced=fenced)
    placed = [spread.replicas(index, factor, start=start) for index in range(count)]
    assert placed == [spread_over(*racks, fenced=fenced).replicas(index, factor, start=start) for index in range(count)]
    for replicas in placed:
        assert len(set(replicas)) == len(replicas) == factor
        assert replicas[0] <= alive, "who is not alive leads nothing"
        used = Counter(racks[node_id - 1] for node_id in replicas)
        assert len(used) == min(factor, len(set(racks)))
    led = Counter(dict.fromkeys(range(1, alive + 1), 0))
    led.update(replicas[0] for replicas in placed)
    assert max(led.values()) - min(led.values()) <= 1


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), st.integers(0, 11))
def test_equal_racks_give_equal_shares(per_rack: int, racks: int, factor: int, rounds: int, start: int) -> None:
    """Any node may come first in the order, and the shares are still equal."""
    nodes = [name for name in "abc"[:racks] for _ in range(per_rack)]
    factor = min(factor, len(nodes))
    spread = spread_over(*nodes)
    held: Counter[int] = Counter()
    for place in range(len(nodes) * rounds):
        held.update(spread.replicas(place, factor, start=start))
    assert set(held.values()) == {factor * rounds}
