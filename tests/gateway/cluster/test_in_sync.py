"""Leaders and in-sync replicas while eligible.leader.replicas.version is 0, by values; and that level 1 ignores
in-sync.
"""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.in_sync import NO_LEADER, followed, leader, members
from gateway.cluster.placement import Leaders
from storage.types import Assignment, Partition, PartitionKey

NODE_IDS = st.integers(0, 6)
SOME = st.lists(NODE_IDS, min_size=1, max_size=4, unique=True).map(tuple)
ALIVE = st.frozensets(NODE_IDS)


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    """Draw any assignment, also one that no pass leaves: in-sync nodes that are no replicas, as the previous release
    allowed.
    """
    return Assignment(draw(SOME), draw(st.none() | NODE_IDS), draw(st.none() | SOME))


@pytest.mark.parametrize(
    ("in_sync", "alive", "unclean", "expected", "led_by"),
    [
        (None, {1, 2, 3}, False, None, 1),
        (None, {2, 3}, False, (2, 3), 2),
        ((2, 3), {3}, False, (3,), 3),
        ((3,), {1, 2, 3}, False, None, 1),
        ((3,), set(), False, (3,), NO_LEADER),
        ((3,), {1, 2}, False, (3,), NO_LEADER),
        ((3,), {1, 2}, True, (1,), NO_LEADER),
        ((3,), {2}, True, (2,), NO_LEADER),
        ((3,), {7}, True, (3,), NO_LEADER),
        ((2, 3), {1}, False, (2, 3), NO_LEADER),
        (None, set(), False, None, NO_LEADER),
        ((8,), {2}, False, (2,), 2),
    ],
)
def test_only_live_replicas_stay_in_sync(
    in_sync: tuple[int, ...] | None,
    alive: set[int],
    unclean: bool,
    expected: tuple[int, ...] | None,
    led_by: int,
) -> None:
    known = Assignment((1, 2, 3), None, in_sync)
    if led_by != 1 or in_sync is None:
        assert leader(known, alive) == led_by
    assert followed(known, alive, unclean=unclean) == expected


def placed(key: int, assignment: Assignment | None = None) -> Partition:
    return Partition(0, PartitionKey(key), 0, assignment, UUID(int=key), 1)


def test_elected_leader_leads_while_in_sync_and_alive() -> None:
    assert leader(Assignment((1, 2, 3), 3, (1, 3)), {1, 2, 3}) == 3
    assert leader(Assignment((1, 2, 3), 3, (1, 2)), {1, 2, 3}) == 1
    assert leader(Assignment((1, 2, 3), 3, (1, 3)), {1, 2}) == 1


@given(assignments(), ALIVE)
def test_leader_is_in_sync_and_alive(known: Assignment, alive: frozenset[int]) -> None:
    led_by = leader(known, alive)
    if led_by == NO_LEADER:
        assert alive.isdisjoint(members(known))
    else:
        assert led_by in alive
        assert led_by in members(known)


@given(assignments(), ALIVE, st.booleans())
def test_in_sync_set_is_never_empty(known: Assignment, alive: frozenset[int], unclean: bool) -> None:
    after = Assignment(known.replicas, known.leader, followed(known, alive, unclean=unclean))
    in_sync = members(after)
    assert in_sync
    assert [node for node in known.replicas if node in in_sync] == list(in_sync)
    assert after.in_sync != known.replicas, "all are None"
    if leader(known, alive) != NO_LEADER:
        assert set(in_sync) == alive.intersection(known.replicas)
    elif unclean and not alive.isdisjoint(known.replicas):
        assert leader(after, alive) == in_sync[0]
        assert len(in_sync) == 1
    else:
        assert in_sync == members(known), "the last ones stay"
        assert leader(after, alive) == NO_LEADER


@given(assignments(), ALIVE, st.booleans())
def test_second_pass_changes_nothing(known: Assignment, alive: frozenset[int], unclean: bool) -> None:
    """A replica that was elected uncleanly leads from then on, so the others join it in the second pass."""
    for _ in range(2):
        known = Assignment(known.replicas, known.leader, followed(known, alive, unclean=unclean))
    assert followed(known, alive, unclean=unclean) == known.in_sync


@given(assignments(), st.lists(ALIVE, max_size=6))
def test_leader_continues_while_alive(known: Assignment, looks: list[frozenset[int]]) -> None:
    """A leader keeps leading if other replicas come or go, unless one returns that precedes it among the replicas."""
    for alive in looks:
        known = Assignment(known.replicas, known.leader, followed(known, alive, unclean=False))
        led_by = leader(known, alive)
        if led_by != NO_LEADER:
            with_others = alive | set(known.replicas)
            kept = Assignment(known.replicas, led_by, followed(known, with_others, unclean=False))
            assert leader(kept, with_others) == led_by


@given(st.frozensets(NODE_IDS, min_size=1), assignments(), st.integers(0, 2**63 - 1))
def test_in_sync_set_has_no_effect_at_level_1(alive: frozenset[int], known: Assignment, key: int) -> None:
    leaders, forgotten = Leaders(alive), known._replace(in_sync=None)
    assert leaders.leader(placed(key, known)) == leaders.leader(placed(key, forgotten)) != NO_LEADER
    assert leaders.in_sync(known) == tuple(node for node in known.replicas if node in alive)
    assert not leaders.leaves_unled(known)


@given(st.frozensets(NODE_IDS, min_size=1), assignments(), st.integers(0, 2**63 - 1))
def test_in_sync_set_has_effect_at_level_0(alive: frozenset[int], known: Assignment, key: int) -> None:
    leaders = Leaders(alive, only_in_sync=True)
    assert leaders.leader(placed(key, known)) == leader(known, alive)
    assert leaders.in_sync(known) == members(known)
    assert leaders.leaves_unled(known) is (leader(known, alive) == NO_LEADER)
    assert leaders.leader(placed(key)) == Leaders(alive).leader(placed(key)), "where nobody has named any"
