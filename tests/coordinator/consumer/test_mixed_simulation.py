"""Seeded runs of groups that change their protocol. Another test puts bugs into the migration, and checks that such
runs find them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from gateway.coordinator.classic import sync
from gateway.coordinator.classic.model import GroupState
from gateway.coordinator.cluster import Cluster
from gateway.coordinator.consumer import classic_members, embedded, machine, migration, unsettled
from gateway.coordinator.consumer.draft import Draft
from gateway.coordinator.consumer.partitions import NOTHING, Partitions, partitions_of
from gateway.coordinator.facts import Conversion
from gateway.coordinator.machine import Adopted, NotAdopted, Step
from tests.steps.seeds import finds, first_always

from .simulation.classic_client import ClassicClient
from .simulation.mixed import MixedServer, run, run_with

BLOCKS = int(os.environ.get("SLUICE_SIMULATION_BLOCKS", "10"))
BLOCKS_EACH_TIME = 2
SEEDS_PER_BLOCK = 200
"""Each seed takes about 15 ms."""
SEEDS_OF_MUTANTS = range(900, 1_500)
FIND_THE_RAREST = (1216, 930, 939, 1141)
"""Seeds that find a certain defect, which most other seeds miss. In the first of them a late join does harm."""
SEEDS_OF_MUTANTS_ABOUT_TOPICS = range(400)
"""In two of these seeds, a leader that ignores changes of topics causes a violation."""
FIND_THE_RAREST_ABOUT_TOPICS = (77, 144)
"""Seeds that found defects which most other seeds miss."""

BLOCKS_WITH_TOPICS = max(1, BLOCKS // 5)
"""Seeds of runs in which topics are created, extended, deleted and recreated."""
BLOCKS_THAT_ROLL = max(1, BLOCKS // 5)
"""Seeds of runs in which classic members offer the eager protocol, the cooperative one, or both."""
BLOCKS_THAT_LAG = max(1, BLOCKS // 5)
"""Seeds of runs in which the group moves to nodes that have not read the newest topics."""
FIND_A_LOST_DOWNGRADE = (228, 511)
"""Seeds in which the last consumer member leaves while the node is behind."""
FIND_A_REFUSED_SYNC = (92, 120)
"""Seeds in which a member syncs with its own first protocol after a downgrade."""


def conversions_seen(
    block: int, *, topics_change: bool = False, rolls: bool = False, lags: bool = False
) -> set[Conversion]:
    """Run one block of seeds, each of which must keep the rules. Return the conversions of groups that happened."""
    seen: set[Conversion] = set()
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        servers: list[MixedServer] = []
        outcome = run_with(seed, servers.append, topics_change=topics_change, rolls=rolls, lags=lags)
        assert outcome.foul is None, f"seed {seed}: {outcome.foul}\n" + "\n".join(outcome.told[-40:])
        seen.update(servers[0].conversions)
    return seen


@pytest.mark.parametrize("block", first_always(range(BLOCKS), BLOCKS_EACH_TIME))
def test_every_seeded_run_keeps_the_rules(block: int) -> None:
    """The coordinator knows every partition that a member reads, with either machine. In the end every live member has
    its share, and the group has the type that its members require.
    """
    assert conversions_seen(block) == set(Conversion), "every way of becoming another group is met"


@pytest.mark.parametrize("block", first_always(range(BLOCKS_WITH_TOPICS), 1))
def test_every_seeded_run_with_changing_topics_keeps_the_rules(block: int) -> None:
    """The same rules with changing topics. In the end members read all partitions that exist."""
    assert conversions_seen(block, topics_change=True) == set(Conversion)


@pytest.mark.parametrize("block", first_always(range(BLOCKS_THAT_ROLL), 1))
def test_every_seeded_run_of_a_rolling_upgrade_keeps_the_rules(block: int) -> None:
    """The same rules with eager and cooperative members. No member is refused because of its protocol."""
    assert conversions_seen(block, rolls=True) == set(Conversion)


@pytest.mark.parametrize("block", first_always(range(BLOCKS_THAT_LAG), 1))
def test_every_seeded_run_with_nodes_that_are_behind_keeps_the_rules(block: int) -> None:
    """The same rules. A node takes away no topic that it has not read, and does not take it for deleted."""
    assert conversions_seen(block, topics_change=True, lags=True) == set(Conversion)


def test_downgrade_that_is_not_tried_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    is_left = machine.is_left_to_classic_members
    monkeypatch.setattr(
        machine,
        "is_left_to_classic_members",
        lambda *given, later: not later and is_left(*given, later=False),
    )
    assert finds(
        range(600),
        lambda seed: run(seed, topics_change=True, lags=True).foul is not None,
        found_before=FIND_A_LOST_DOWNGRADE,
    )


def test_refused_sync_after_a_downgrade_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "names", lambda _: frozenset())
    assert finds(range(400), lambda seed: run(seed, rolls=True).foul is not None, found_before=FIND_A_REFUSED_SYNC)


def nothing(*_: Any, **__: Any) -> None:
    pass


def none_held(group: Any, *_: Any) -> Any:
    return dict.fromkeys(group.members, NOTHING)


def none_early(*arguments: Any) -> Any:
    found, _ = undrained(*arguments)
    return found, ()


def without_replies(*arguments: Any) -> Adopted | NotAdopted | None:
    adopted = upgraded(*arguments)
    return replace(adopted, replies=()) if isinstance(adopted, Adopted) else adopted


def without_rebalance(taken: Step, *arguments: Any) -> Step:
    step = downgraded(taken, *arguments)
    return replace(step, group=replace(step.group, state=GroupState.STABLE, phase_deadline_ms=None))


upgraded, downgraded, undrained = migration.upgraded, migration.downgraded, vars(migration)["_undrained"]


@pytest.mark.parametrize(
    ("holder", "name", "mutant"),
    [
        pytest.param(migration, "_held", none_held, id="an upgrade forgets who holds what"),
        pytest.param(migration, "_undrained", lambda *_: ({}, ()), id="an upgrade forgets what is drained"),
        pytest.param(migration, "_undrained", none_early, id="an upgrade forgets who was told early"),
        pytest.param(migration, "_drains_on", lambda *_: (), id="a downgrade forgets what is drained"),
        pytest.param(migration, "is_cooperative", lambda name: False, id="claims count for nothing"),
        pytest.param(machine, "upgraded", without_replies, id="held requests are never answered"),
        pytest.param(machine, "downgraded", without_rebalance, id="nobody is asked to join again"),
        pytest.param(machine, "is_left_to_classic_members", lambda *_, **__: False, id="nothing is ever downgraded"),
        pytest.param(classic_members, "_must_join", lambda *_: False, id="members are not told of a rebalance"),
        pytest.param(classic_members, "_waits_for_others", lambda *_: True, id="members wait for what is free"),
        pytest.param(classic_members, "_owned", lambda *_: NOTHING, id="joining is letting go of everything"),
        pytest.param(classic_members, "_owned", lambda *_: None, id="nobody ever lets go"),
        pytest.param(classic_members, "check_not_overtaken", nothing, id="late joins are believed"),
        pytest.param(classic_members, "_await_join", nothing, id="joins are awaited for ever"),
        pytest.param(embedded, "assignment", lambda *_: b"\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff", id="no shares"),
        pytest.param(Draft, "hear", nothing, id="sessions never begin anew"),
    ],
)
def test_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(holder, name, mutant)
    assert finds(SEEDS_OF_MUTANTS, lambda seed: run(seed).foul is not None, found_before=FIND_THE_RAREST)


def no_topics_change(draft: Draft) -> bool:
    draft.seen = draft.cluster
    return False


def all_are_there(named: Iterable[tuple[str, Iterable[int]]], cluster: Cluster) -> Partitions:
    return partitions_of((cluster.topics[name].topic_id, indexes) for name, indexes in named)


@pytest.mark.parametrize(
    ("holder", "name", "mutant"),
    [
        pytest.param(migration, "_is_settled", lambda *_: True, id="who comes back goes on whatever moves"),
        pytest.param(Draft, "see_topics", no_topics_change, id="topics stay as they were"),
        pytest.param(embedded, "by_id", all_are_there, id="nobody claims what is gone"),
        pytest.param(unsettled, "follow_owners", nothing, id="what is gone is not settled either"),
        pytest.param(ClassicClient, "_sees_news", lambda _: False, id="a leader does not look"),
    ],
)
def test_planted_bug_about_topics_is_found(
    monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(holder, name, mutant)
    assert finds(
        SEEDS_OF_MUTANTS_ABOUT_TOPICS,
        lambda seed: run(seed, topics_change=True).foul is not None,
        found_before=FIND_THE_RAREST_ABOUT_TOPICS,
    )
