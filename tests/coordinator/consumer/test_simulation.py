"""Seeded runs of the simulation. Another test puts bugs into the coordinator, and checks that such runs find them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from gateway.coordinator.consumer import current_assignment, handoff, heartbeat, identity
from gateway.coordinator.consumer.draft import Draft
from gateway.coordinator.consumer.partitions import NOTHING
from tests.steps.seeds import finds

from .simulation.play import run

BLOCKS = int(os.environ.get("SLUICE_SIMULATION_BLOCKS", "4"))
SEEDS_PER_BLOCK = 20
"""Each seed takes about 300 ms."""
SEEDS_PER_MUTANT = 100
FIND_THE_RAREST = (30, 66)
"""Seeds that find a coordinator which believes slow members, or accepts late requests."""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_seeded_run_keeps_the_rules(block: int) -> None:
    """No partition has two owners, the rows agree with memory, every wait has a deadline, and in the end every live
    member has its share.
    """
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        outcome = run(seed)
        assert outcome.foul is None, f"seed {seed}: {outcome.foul}\n" + "\n".join(outcome.told[-40:])


def nothing(*_: Any) -> None:
    pass


has_let_go = vars(current_assignment)["_has_let_go"]


def nothing_doubted(*arguments: Any) -> bool:
    return has_let_go(*arguments[:-1], NOTHING)


def no_topics_change(draft: Draft, _: str = "") -> bool:
    draft.seen = draft.cluster
    return False


@pytest.mark.parametrize(
    ("holder", "name", "mutant"),
    [
        pytest.param(identity, "check_not_overtaken", nothing, id="late requests are believed"),
        pytest.param(current_assignment, "_free", lambda wanted, *_: wanted, id="partitions are given while owned"),
        pytest.param(current_assignment, "meet", lambda *_: False, id="revocations are not awaited"),
        pytest.param(current_assignment, "_has_let_go", nothing_doubted, id="slow members are believed to let go"),
        pytest.param(Draft, "arm_rebalance", nothing, id="revocations are awaited for ever"),
        pytest.param(Draft, "see_topics", no_topics_change, id="topics stay as they were"),
        pytest.param(Draft, "_release", nothing, id="partitions are never free again"),
        pytest.param(heartbeat, "retained", lambda _, before, after: after, id="nobody drains"),
        pytest.param(handoff, "expire", nothing, id="sources are waited for for ever"),
        pytest.param(handoff, "arm", nothing, id="draining has no deadline"),
        pytest.param(handoff, "take_over", nothing, id="a successor forgets what is drained"),
        pytest.param(handoff, "member_changed", nothing, id="moves never end"),
        pytest.param(heartbeat, "_has_no_news", lambda *_: True, id="news are overlooked"),
    ],
)
def test_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(holder, name, mutant)
    assert finds(range(SEEDS_PER_MUTANT), lambda seed: run(seed).foul is not None, found_before=FIND_THE_RAREST)
