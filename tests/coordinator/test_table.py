"""The table that the machine runs covers every state and event, contains only legal transitions, and can be printed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from typing import get_args

import pytest

from gateway.coordinator.classic.draft import Draft
from gateway.coordinator.classic.identity import Standing
from gateway.coordinator.classic.join import ANSWERS
from gateway.coordinator.classic.model import LEGAL_TRANSITIONS, Event, Group, GroupState
from gateway.coordinator.classic.table import TABLE, render_table
from gateway.coordinator.facts import MemberId
from gateway.coordinator.settings import Settings

from .scene import Scene


def reachable(state: GroupState) -> set[GroupState]:
    """Return the states that any number of legal transitions can reach."""
    found = {state}
    while True:
        further = found.union(*(LEGAL_TRANSITIONS[each] for each in found))
        if further == found:
            return found
        found = further


def test_every_event_meets_every_state() -> None:
    assert set(TABLE) == set(get_args(Event))
    for row in TABLE.values():
        assert set(row) == set(GroupState)
    assert set(ANSWERS) == set(GroupState) - {GroupState.DEAD}
    for answers in ANSWERS.values():
        assert set(answers) == set(Standing)


def test_every_cell_follows_a_legal_transition() -> None:
    for row in TABLE.values():
        for state, cell in row.items():
            assert cell.leads_to <= reachable(state)
            assert cell.leads_to, "a step ends somewhere"


def test_legal_transitions_are_upstreams() -> None:
    """The table lists the legal predecessors of each state, from Kafka's own list. No state leads to itself."""
    predecessors = {
        state: {before for before, after in LEGAL_TRANSITIONS.items() if state in after} for state in GroupState
    }
    empty, preparing, completing, stable, dead = GroupState
    assert predecessors == {
        empty: {preparing},
        preparing: {empty, completing, stable},
        completing: {preparing},
        stable: {completing},
        dead: {empty, preparing, completing, stable},
    }


@pytest.mark.parametrize("before", GroupState)
@pytest.mark.parametrize("after", GroupState)
def test_a_draft_makes_only_legal_transitions(before: GroupState, after: GroupState) -> None:
    draft = Draft(Group("g", before), 0, Settings())
    if after in LEGAL_TRANSITIONS[before]:
        draft.transition(after)
        assert draft.state is after
    else:
        with pytest.raises(AssertionError, match="cannot become"):
            draft.transition(after)


def test_the_table_is_drawn_by_a_command() -> None:
    drawn = subprocess.run(
        [sys.executable, "-m", "gateway.coordinator.classic.table"], capture_output=True, text=True, check=True
    ).stdout
    assert drawn == render_table() + "\n"
    assert "| Tick | `tick` | `tick` → Empty, PreparingRebalance, CompletingRebalance |" in drawn
    assert "| member's id | UNKNOWN_MEMBER_ID | `rejoin_while_preparing` |" in drawn


def test_sealing_an_untouched_draft_gives_an_equal_group() -> None:
    scene = Scene()
    scene.stable("a", "b", instances={"a": "ia"})
    scene.join("p", version=4)
    scene.close("b")
    assert Draft(scene.group, 0, Settings()).seal().group == scene.group


def test_moving_a_session_deadline_moves_nothing_else() -> None:
    """`with_session_deadline` names every field explicitly. So this test gives each field another value."""
    scene = Scene(delay_ms=3000)
    held = [scene.join("a"), scene.join("b", instance="ib")]
    scene.join("p", version=4)
    group = replace(
        scene.group,
        **{field.name: f"<{field.name}>" for field in fields(Group) if field.name != "session_deadlines"},
    )
    assert all(asked.parked for asked in held)
    member_id = next(iter(group.session_deadlines))
    moved = group.with_session_deadline(member_id, 1)
    assert moved == replace(group, session_deadlines={**group.session_deadlines, MemberId(member_id): 1})
    assert group.session_deadlines[member_id] != 1
