"""The protocol of a classic group as a table: state × event, each cell the function that runs and where it may lead.

The one idea: the table that is printed is the table that runs, so the two cannot differ. Run as a module, it prints
itself as Markdown, followed by the matrix of JoinGroup (`join.ANSWERS`). The simulation in the tests checks every step
against its cell's `leads_to`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from gateway.coordinator.classic import deadlines, handoff_progress, heartbeat, join, leave, sync
from gateway.coordinator.classic.identity import Standing
from gateway.coordinator.classic.model import LEGAL_TRANSITIONS, Group, GroupState
from gateway.coordinator.machine import ConnectionClosed, Step, Tick
from gateway.coordinator.requests import (
    DeleteGroup,
    HandoffProgress,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    OffsetCommit,
    SyncGroup,
    TxnOffsetCommit,
)
from gateway.coordinator.settings import Settings
from protocol.errors import ErrorCode

EMPTY = GroupState.EMPTY
PREPARING = GroupState.PREPARING_REBALANCE
COMPLETING = GroupState.COMPLETING_REBALANCE
STABLE = GroupState.STABLE
DEAD = GroupState.DEAD

EventT = TypeVar("EventT")

Handler = Callable[..., Step[Group]]
"""Function of a cell: `(group, event, now_ms, settings)`. Its event is of the type that names the row of the table."""


@dataclass(frozen=True, slots=True)
class Cell:
    handler: Handler
    leads_to: frozenset[GroupState]
    """The states in which the group may be after the step, including its current one."""


def _cell(handler: Callable[[Group, EventT, int, Settings], Step[Group]], *leads_to: GroupState) -> Cell:
    return Cell(handler, frozenset(leads_to))


TABLE: Mapping[type, Mapping[GroupState, Cell]] = {
    JoinGroup: {
        EMPTY: _cell(join.join, EMPTY, PREPARING, COMPLETING),
        PREPARING: _cell(join.join, PREPARING, COMPLETING),
        COMPLETING: _cell(join.join, COMPLETING, PREPARING),
        STABLE: _cell(join.join, STABLE, PREPARING, COMPLETING),
        DEAD: _cell(join.refuse_dead, DEAD),
    },
    SyncGroup: {
        EMPTY: _cell(sync.sync_empty, EMPTY),
        PREPARING: _cell(sync.sync_preparing, PREPARING),
        COMPLETING: _cell(sync.sync_completing, COMPLETING, STABLE),
        STABLE: _cell(sync.sync_stable, STABLE),
        DEAD: _cell(sync.sync_dead, DEAD),
    },
    Heartbeat: {
        EMPTY: _cell(heartbeat.heartbeat_empty, EMPTY),
        PREPARING: _cell(heartbeat.heartbeat_preparing, PREPARING),
        COMPLETING: _cell(heartbeat.heartbeat_live, COMPLETING),
        STABLE: _cell(heartbeat.heartbeat_live, STABLE),
        DEAD: _cell(heartbeat.heartbeat_dead, DEAD),
    },
    OffsetCommit: {
        EMPTY: _cell(heartbeat.commit_empty, EMPTY),
        PREPARING: _cell(heartbeat.commit_live, PREPARING),
        COMPLETING: _cell(heartbeat.commit_completing, COMPLETING),
        STABLE: _cell(heartbeat.commit_live, STABLE),
        DEAD: _cell(heartbeat.commit_dead, DEAD),
    },
    TxnOffsetCommit: {
        EMPTY: _cell(heartbeat.txn_commit_empty, EMPTY),
        PREPARING: _cell(heartbeat.txn_commit_live, PREPARING),
        COMPLETING: _cell(heartbeat.txn_commit_live, COMPLETING),
        STABLE: _cell(heartbeat.txn_commit_live, STABLE),
        DEAD: _cell(heartbeat.commit_dead, DEAD),
    },
    LeaveGroup: {
        EMPTY: _cell(leave.leave, EMPTY),
        PREPARING: _cell(leave.leave, PREPARING, COMPLETING, EMPTY),
        COMPLETING: _cell(leave.leave, COMPLETING, PREPARING, EMPTY),
        STABLE: _cell(leave.leave, STABLE, PREPARING, EMPTY),
        DEAD: _cell(leave.leave_dead, DEAD),
    },
    DeleteGroup: {
        EMPTY: _cell(leave.delete_empty, EMPTY, DEAD),
        PREPARING: _cell(leave.delete_live, PREPARING),
        COMPLETING: _cell(leave.delete_live, COMPLETING),
        STABLE: _cell(leave.delete_live, STABLE),
        DEAD: _cell(leave.delete_dead, DEAD),
    },
    ConnectionClosed: {
        EMPTY: _cell(deadlines.connection_closed, EMPTY),
        PREPARING: _cell(deadlines.connection_closed, PREPARING),
        COMPLETING: _cell(deadlines.connection_closed, COMPLETING),
        STABLE: _cell(deadlines.connection_closed, STABLE),
        DEAD: _cell(deadlines.connection_closed, DEAD),
    },
    Tick: {
        EMPTY: _cell(deadlines.tick, EMPTY),
        PREPARING: _cell(deadlines.tick, PREPARING, COMPLETING, EMPTY),
        COMPLETING: _cell(deadlines.tick, COMPLETING, PREPARING, EMPTY),
        STABLE: _cell(deadlines.tick, STABLE, PREPARING, EMPTY),
        DEAD: _cell(deadlines.tick, DEAD),
    },
    HandoffProgress: {
        EMPTY: _cell(handoff_progress.progress_elsewhere, EMPTY),
        PREPARING: _cell(handoff_progress.progress_elsewhere, PREPARING),
        COMPLETING: _cell(handoff_progress.progress_elsewhere, COMPLETING),
        STABLE: _cell(handoff_progress.progress_stable, STABLE),
        DEAD: _cell(handoff_progress.progress_elsewhere, DEAD),
    },
}


def render_table() -> str:
    """Return the whole protocol as Markdown: what each event runs and leads to, how joins are answered, legal
    transitions."""
    return "\n\n".join(
        (
            "## Events",
            "`function` → the states it may leave the group in, where that is not only its own.",
            _markdown(
                ["", *(state.value for state in GroupState)],
                [
                    [event.__name__, *(_render(state, row[state]) for state in GroupState)]
                    for event, row in TABLE.items()
                ],
            ),
            "## JoinGroup, by who asks",
            _markdown(
                ["", *(state.value for state in join.ANSWERS)],
                [
                    [standing.value, *(_render_answer(row[standing]) for row in join.ANSWERS.values())]
                    for standing in Standing
                ],
            ),
            "## Transitions",
            _markdown(
                ["from", "to"],
                [[state.value, _names(LEGAL_TRANSITIONS[state])] for state in GroupState],
            ),
        )
    )


def _render(state: GroupState, cell: Cell) -> str:
    text = f"`{cell.handler.__name__}`"
    return text if cell.leads_to == frozenset((state,)) else f"{text} → {_names(cell.leads_to)}"


def _names(states: frozenset[GroupState]) -> str:
    return ", ".join(state.value for state in GroupState if state in states)


def _render_answer(answer: join.JoinAnswer | ErrorCode) -> str:
    return answer.name if isinstance(answer, ErrorCode) else f"`{answer.__name__}`"


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(render_table())
