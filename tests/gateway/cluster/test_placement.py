"""Leaders are spread evenly within each topic, equally on every node, and little moves when a node joins or leaves."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.placement import Leaders, shares, spread
from storage.types import Assignment, Partition, PartitionKey

SHARDS = range(50)
TOPICS = [UUID(int=number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128) for number in range(1, 201)]


def partitions_of(topic_id: UUID, count: int, assignment: Assignment | None = None) -> list[Partition]:
    return [Partition(index, PartitionKey(index), 0, assignment, topic_id, count) for index in range(count)]


def leaders_of(topic_id: UUID, count: int, *node_ids: int) -> list[int]:
    leaders = Leaders(node_ids)
    return [leaders.leader(partition) for partition in partitions_of(topic_id, count)]


@given(st.uuids(), st.sets(st.integers(-1, 2**31 - 1), min_size=1, max_size=12), st.integers(1, 60))
def test_leader_counts_within_a_topic_differ_by_one_at_most(topic_id: UUID, node_ids: set[int], count: int) -> None:
    counts = Counter(dict.fromkeys(node_ids, 0))
    counts.update(leaders_of(topic_id, count, *node_ids))
    assert counts.keys() == node_ids
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("nodes", [2, 3, 5, 8])
def test_leaders_of_topics_of_one_partition_are_spread_over_all_nodes(nodes: int) -> None:
    counts = Counter(leaders_of(topic_id, 1, *range(1, nodes + 1))[0] for topic_id in TOPICS)
    assert len(counts) == nodes
    assert max(counts.values()) < len(TOPICS) / nodes * 1.6


@pytest.mark.parametrize("nodes", [2, 3, 5, 10])
@pytest.mark.parametrize(("count", "bound"), [(1, 1.4), (3, 1.4), (12, 2.2), (50, 2.0), (1_000, 1.3)])
def test_node_that_joins_or_leaves_moves_little_beside_its_own_share(nodes: int, count: int, bound: float) -> None:
    """A node that joins or leaves moves at most `bound` times 1/n of the leaders, on average over many topics."""
    topics = TOPICS if count < 1_000 else TOPICS[:20]
    moved = 0
    for number, topic_id in enumerate(topics):
        node_ids = range(1, nodes + 1)
        without = [node_id for node_id in node_ids if node_id != number % nodes + 1]
        before, after = leaders_of(topic_id, count, *node_ids), leaders_of(topic_id, count, *without)
        moved += sum(old != new for old, new in zip(before, after, strict=True))
    assert moved <= len(topics) * count / nodes * bound


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_a_partition_that_is_added_moves_few_others(nodes: int) -> None:
    moved = 0
    for topic_id in TOPICS:
        before = leaders_of(topic_id, 50, *range(1, nodes + 1))
        moved += sum(
            old != new for old, new in zip(before, leaders_of(topic_id, 51, *range(1, nodes + 1)), strict=False)
        )
    assert moved <= 3 * len(TOPICS)


def test_the_order_in_which_nodes_are_listed_does_not_matter() -> None:
    assert leaders_of(TOPICS[0], 20, 3, 1, 2) == leaders_of(TOPICS[0], 20, 1, 2, 3)
    assert shares(SHARDS, [3, 1, 2]) == shares(SHARDS, [1, 2, 3])


def test_leaders_are_the_same_in_every_process_and_release() -> None:
    assert spread(UUID(int=1), (1, 2, 3), 9) == (1, 1, 2, 3, 2, 2, 1, 3, 3), "nodes that differ send clients to and fro"


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


def test_no_shard_is_held_without_live_nodes() -> None:
    assert shares(SHARDS, []) == {}


# --- nodes that were named ------------------------------------------------------------------------------------------

NODE_IDS = st.integers(0, 6)
NAMED = st.lists(NODE_IDS, min_size=1, max_size=4, unique=True).map(tuple)


@given(st.sets(NODE_IDS, min_size=1), NAMED, st.none() | NODE_IDS, st.integers(0, 2**63 - 1))
def test_the_first_named_node_that_is_alive_leads(
    alive: set[int], replicas: tuple[int, ...], kept: int | None, key: int
) -> None:
    (partition,) = partitions_of(UUID(int=key), 1, Assignment(replicas, kept))
    leader = Leaders(alive).leader(partition)
    living = [node_id for node_id in replicas if node_id in alive]
    if kept in living:
        assert leader == kept, "it leads until another is elected"
    elif living:
        assert leader == living[0]
    else:
        assert [leader] == leaders_of(UUID(int=key), 1, *alive), "whoever would lead without an assignment"


@given(st.sets(NODE_IDS, min_size=1), NAMED, NODE_IDS, st.integers(0, 2**63 - 1))
def test_named_node_that_joins_or_leaves_moves_its_leadership_alone(
    alive: set[int], replicas: tuple[int, ...], other: int, key: int
) -> None:
    (partition,) = partitions_of(UUID(int=key), 1, Assignment(replicas))
    without, with_it = Leaders(alive - {other} or {9}), Leaders(alive | {other})
    before, after = without.leader(partition), with_it.leader(partition)
    assert after in (before, other) or before == 9
