"""Rendezvous hashing: even, the same everywhere, and little moves when a node comes or goes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.in_sync import NO_LEADER
from gateway.cluster.placement import Leaders, shares
from storage.types import Assignment

KEYS = range(1, 10_001)
SHARDS = range(50)


def _leaders(*node_ids: int) -> dict[int, int]:
    leaders = Leaders(node_ids)
    return {key: leaders.leader(key) for key in KEYS}


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8])
def test_leaders_are_spread_evenly(nodes: int) -> None:
    counts = Counter(_leaders(*range(1, nodes + 1)).values())
    assert len(counts) == nodes
    assert max(counts.values()) < len(KEYS) / nodes * 1.1


@pytest.mark.parametrize("nodes", [2, 3, 5, 8])
def test_a_node_that_comes_takes_its_part_and_nothing_else_moves(nodes: int) -> None:
    before, after = _leaders(*range(1, nodes)), _leaders(*range(1, nodes + 1))
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} == {nodes}
    assert len(moved) < len(KEYS) / nodes * 1.1


def test_the_order_in_which_nodes_are_listed_does_not_matter() -> None:
    assert _leaders(3, 1, 2) == _leaders(1, 2, 3)
    assert shares(SHARDS, [3, 1, 2]) == shares(SHARDS, [1, 2, 3])


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 49, 50, 60])
def test_shards_are_shared_to_within_one(nodes: int) -> None:
    placed = shares(SHARDS, range(1, nodes + 1))
    assert placed.keys() == set(SHARDS)
    counts = Counter(dict.fromkeys(range(1, nodes + 1), 0))
    counts.update(placed.values())
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("nodes", [2, 3, 4, 6])
def test_few_shards_move_when_a_node_comes(nodes: int) -> None:
    before, after = shares(SHARDS, range(1, nodes)), shares(SHARDS, range(1, nodes + 1))
    moved = sum(before[shard] != after[shard] for shard in SHARDS)
    assert moved <= len(SHARDS) / nodes * 1.8, "one part in n, and the evening out"


def test_nobody_alive_holds_nothing() -> None:
    assert shares(SHARDS, []) == {}


# --- nodes that were named ------------------------------------------------------------------------------------------

NODE_IDS = st.integers(0, 6)
NAMED = st.lists(NODE_IDS, min_size=1, max_size=4, unique=True).map(tuple)


@given(st.sets(NODE_IDS, min_size=1), NAMED, st.none() | NODE_IDS, st.integers(0, 2**63 - 1))
def test_the_first_named_node_that_is_alive_leads(
    alive: set[int], replicas: tuple[int, ...], kept: int | None, key: int
) -> None:
    leader = Leaders(alive).leader(key, Assignment(replicas, kept))
    living = [node_id for node_id in replicas if node_id in alive]
    if kept in living:
        assert leader == kept, "it leads until another is elected"
    elif living:
        assert leader == living[0]
    else:
        assert leader == Leaders(alive).leader(key), "whoever would lead without an assignment"


@given(st.sets(NODE_IDS, min_size=1), NAMED, st.none() | NODE_IDS, st.integers(0, 2**63 - 1))
def test_where_only_the_named_may_lead_nobody_else_does(
    alive: set[int], replicas: tuple[int, ...], kept: int | None, key: int
) -> None:
    assignment, leaders = Assignment(replicas, kept), Leaders(alive, only_named=True)
    if alive.isdisjoint(replicas):
        assert leaders.leader(key, assignment) == NO_LEADER
        assert leaders.leaves_unled(assignment)
    else:
        assert leaders.leader(key, assignment) == Leaders(alive).leader(key, assignment)
        assert not leaders.leaves_unled(assignment)
    assert leaders.leader(key) == Leaders(alive).leader(key), "where none were named nothing is otherwise"
    assert not Leaders(alive).leaves_unled(assignment)


@given(st.sets(NODE_IDS, min_size=1), NAMED, NODE_IDS, st.integers(0, 2**63 - 1))
def test_who_comes_or_goes_moves_only_what_it_leads(
    alive: set[int], replicas: tuple[int, ...], other: int, key: int
) -> None:
    assignment = Assignment(replicas)
    without, with_it = Leaders(alive - {other} or {9}), Leaders(alive | {other})
    before, after = without.leader(key, assignment), with_it.leader(key, assignment)
    assert after in (before, other) or before == 9
