"""The error matrix of the classic protocol, cell by cell: requesting member × state of the group.

The tables below are Kafka's, in a shorthand, except column C of SyncGroup, Heartbeat and the commits. There a request
without an id is unknown here and fenced in Kafka (`gateway.coordinator.classic.identity.refusal` says why). Each cell
is tested on a group of three members (leader `l`, follower `k`, static `s` of instance `is`) and one pending id. A cell
that ends in an error must leave the group unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.coordinator.classic.model import Group, GroupState
from gateway.coordinator.settings import Settings
from protocol.errors import ErrorCode

from .invariants import must_store
from .scene import Asked, Scene, protocols

CODES = {
    "UNK": ErrorCode.UNKNOWN_MEMBER_ID,
    "FEN": ErrorCode.FENCED_INSTANCE_ID,
    "GEN": ErrorCode.ILLEGAL_GENERATION,
    "REB": ErrorCode.REBALANCE_IN_PROGRESS,
    "CNA": ErrorCode.COORDINATOR_NOT_AVAILABLE,
    "MIR": ErrorCode.MEMBER_ID_REQUIRED,
    "INC": ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
    "GNF": ErrorCode.GROUP_ID_NOT_FOUND,
    "NEG": ErrorCode.NON_EMPTY_GROUP,
    "USE": ErrorCode.UNKNOWN_SERVER_ERROR,
    "ok": ErrorCode.NONE,
    "park": None,
}

DELAYED = Settings(group_initial_rebalance_delay_ms=3000)
"""An initial rebalance delay. With it, the held first join of a group without members becomes visible."""

CHANGED = protocols("range", topics=("t", "u"))


class Cast:
    """The group of one cell."""

    def __init__(self, state: str) -> None:
        self.scene = scene = Scene()
        self.leader = self.follower = self.static = "gone"
        self.pending = "no such pending id"
        if state == "missing":
            scene.settings = DELAYED
            return
        if state == "Dead":
            scene.group = Group("g", GroupState.DEAD, exists=True)
            return
        self.leader, self.follower, self.static = scene.stable("l", "k", "s", instances={"s": "is"})
        match state:
            case "Empty":
                scene.leave("x", self.leader, self.follower, self.static)
                scene.settings = DELAYED
            case "Preparing":
                scene.join("l", self.leader)
            case "Completing":
                scene.join("l", self.leader)
                scene.join("k", self.follower)
                scene.join("s", self.static, instance="is")
        self.pending = scene.join("p", version=4, client_id="pending").join.member_id
        assert scene.state.value.startswith(state)


def cells(table: str) -> list[object]:
    """Return one parameter set (state, column, expected) per cell; `-` marks impossible cells."""
    head, *rows = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
    return [
        pytest.param(state, column, expected, id=f"{state}, {column}: {expected}".replace("−", "-"))
        for state, *row in rows
        for column, expected in zip(head[1:], row, strict=True)
        if expected != "-"
    ]


def check(cast: Cast, ask: Callable[[], Asked], expected: str) -> None:
    before = cast.scene.group
    asked = ask()
    outcome, _, state = expected.partition(" ")
    assert asked.error is CODES[outcome]
    if asked.error not in (None, ErrorCode.NONE, ErrorCode.MEMBER_ID_REQUIRED, ErrorCode.REBALANCE_IN_PROGRESS):
        assert cast.scene.group is before, "a refused request has changed the group"
        assert not must_store(cast.scene.last)
    assert cast.scene.state.value.startswith(state or before.state.value)


JOIN = """
           | A v4 | A v3           | B              | C              | P              | P with instance | U   | K unchanged    | K changed      | K leader       | F   | I
missing    | MIR  | park Preparing | park Preparing | -              | -              | -               | UNK | -              | -              | -              | UNK | UNK
Empty      | MIR  | park Preparing | park Preparing | park Preparing | park Preparing | USE             | UNK | UNK            | UNK            | UNK            | UNK | UNK
Preparing  | MIR  | park           | park           | park           | park           | USE             | UNK | park           | park           | park           | FEN | UNK
Completing | MIR  | park Preparing | park Preparing | park Preparing | park Preparing | USE             | UNK | ok             | park Preparing | ok             | FEN | UNK
Stable     | MIR  | park Preparing | park Preparing | ok             | park Preparing | USE             | UNK | ok             | park Preparing | park Preparing | FEN | UNK
Dead       | CNA  | CNA            | CNA            | CNA            | CNA            | CNA             | CNA | CNA            | CNA            | CNA            | CNA | CNA
"""  # noqa: E501


def join_as(cast: Cast, column: str) -> Asked:
    scene = cast.scene
    match column:
        case "A v4":
            return scene.join("new", version=4)
        case "A v3":
            return scene.join("new", version=3)
        case "B":
            return scene.join("new", instance="new", version=5)
        case "C":
            return scene.join("new", instance="is", version=5)
        case "P":
            return scene.join("p", cast.pending, version=4)
        case "P with instance":
            return scene.join("p", cast.pending, version=5, instance="ip")
        case "U":
            return scene.join("new", "ghost")
        case "K unchanged":
            return scene.join("k", cast.follower)
        case "K changed":
            return scene.join("k", cast.follower, offer=CHANGED)
        case "K leader":
            return scene.join("l", cast.leader)
        case "F":
            return scene.join("k", cast.follower, instance="is", version=5)
        case "I":
            return scene.join("k", cast.follower, instance="unknown", version=5)
        case _:
            raise AssertionError(column)


@pytest.mark.parametrize(("state", "column", "expected"), cells(JOIN))
def test_join(state: str, column: str, expected: str) -> None:
    cast = Cast(state)
    check(cast, lambda: join_as(cast, column), expected)


@pytest.mark.parametrize("column", ["A v4", "A v3", "B", "C", "P", "U", "K unchanged", "F", "I"])
@pytest.mark.parametrize("state", ["Empty", "Preparing", "Completing", "Stable"])
def test_join_with_a_foreign_protocol_type(state: str, column: str) -> None:
    """In every state the request is refused before the member is checked. A blank member id stays
    blank in the answer.
    """
    cast = Cast(state)
    scene = cast.scene
    before = scene.group
    member_id = {"P": cast.pending, "U": "ghost", "K unchanged": cast.follower, "F": cast.follower, "I": cast.follower}
    instance = {"B": "new", "C": "is", "F": "is", "I": "unknown"}
    asked = scene.join(
        "new",
        member_id.get(column, ""),
        instance=instance.get(column),
        protocol_type="" if state == "Empty" else "connect",
        version=3 if column == "A v3" else 5,
    )
    assert asked.error is ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert asked.join.member_id == member_id.get(column, "")
    assert scene.group is before


SYNC = """
           | A   | B   | P   | U   | I   | C   | F   | K other generation | K other protocol | K follower | K leader
missing    | UNK | UNK | UNK | UNK | UNK | UNK | UNK | UNK                | UNK              | UNK        | UNK
Empty      | UNK | UNK | UNK | UNK | UNK | -   | -   | -                  | -                | -          | -
Preparing  | UNK | UNK | UNK | UNK | UNK | UNK | FEN | GEN                | INC              | REB        | REB
Completing | UNK | UNK | UNK | UNK | UNK | UNK | FEN | GEN                | INC              | park       | ok Stable
Stable     | UNK | UNK | UNK | UNK | UNK | UNK | FEN | GEN                | INC              | ok         | ok
Dead       | CNA | CNA | CNA | CNA | CNA | CNA | CNA | CNA                | CNA              | CNA        | CNA
"""


def identity(cast: Cast, column: str) -> tuple[str, str | None]:
    """Return the member id and the instance id of the column."""
    match column[:1]:
        case "A":
            return "", None
        case "B":
            return "", "new"
        case "C":
            return "", "is"
        case "P":
            return cast.pending, None
        case "U":
            return "ghost", None
        case "I":
            return cast.follower, "unknown"
        case "F":
            return cast.follower, "is"
        case _:
            return (cast.leader if column.endswith("leader") else cast.follower), None


@pytest.mark.parametrize(("state", "column", "expected"), cells(SYNC))
def test_sync(state: str, column: str, expected: str) -> None:
    cast = Cast(state)
    member_id, instance = identity(cast, column)
    check(
        cast,
        lambda: cast.scene.sync(
            "k",
            member_id,
            {cast.leader: b"x"},
            instance=instance,
            generation=cast.scene.generation - 1 if column == "K other generation" else None,
            protocol_name="sticky" if column == "K other protocol" else None,
        ),
        expected,
    )


HEARTBEAT = """
           | A   | B   | P   | U   | I   | C   | F   | K lower | K higher | K
missing    | UNK | UNK | UNK | UNK | UNK | UNK | UNK | UNK     | UNK      | UNK
Empty      | UNK | UNK | UNK | UNK | UNK | -   | -   | -       | -        | UNK
Preparing  | UNK | UNK | UNK | UNK | UNK | UNK | FEN | GEN     | GEN      | REB
Completing | UNK | UNK | UNK | UNK | UNK | UNK | FEN | GEN     | GEN      | ok
Stable     | UNK | UNK | UNK | UNK | UNK | UNK | FEN | GEN     | GEN      | ok
Dead       | CNA | CNA | CNA | CNA | CNA | CNA | CNA | CNA     | CNA      | CNA
"""


@pytest.mark.parametrize(("state", "column", "expected"), cells(HEARTBEAT))
def test_heartbeat(state: str, column: str, expected: str) -> None:
    cast = Cast(state)
    member_id, instance = identity(cast, column)
    generation = cast.scene.generation + {"K lower": -1, "K higher": 1}.get(column, 0)
    check(cast, lambda: cast.scene.heartbeat("k", member_id, instance=instance, generation=generation), expected)


COMMIT = """
           | −1 nobody | −1 K | −1 U | −1 C | K   | K other generation | U   | P   | I   | F
missing    | ok        | ok   | ok   | ok   | GEN | GEN                | GEN | GEN | GEN | GEN
missing v9 | ok        | ok   | ok   | ok   | GNF | GNF                | GNF | GNF | GNF | GNF
Empty      | ok        | ok   | ok   | ok   | UNK | UNK                | UNK | UNK | UNK | UNK
Preparing  | UNK       | GEN  | UNK  | UNK  | ok  | GEN                | UNK | UNK | UNK | FEN
Completing | UNK       | GEN  | UNK  | UNK  | REB | GEN                | UNK | UNK | UNK | FEN
Stable     | UNK       | GEN  | UNK  | UNK  | ok  | GEN                | UNK | UNK | UNK | FEN
Dead       | CNA       | CNA  | CNA  | CNA  | CNA | CNA                | CNA | CNA | CNA | CNA
"""


@pytest.mark.parametrize(("state", "column", "expected"), cells(COMMIT))
def test_offset_commit(state: str, column: str, expected: str) -> None:
    state, _, version = state.partition(" v")
    cast = Cast(state)
    before = cast.scene.group
    who = column.removeprefix("−1 ")
    member_id, instance = ("", None) if who == "nobody" else identity(cast, who)
    generation = cast.scene.generation
    if column.startswith("−1"):
        generation = -1
    elif column == "K other generation":
        generation += 1
    check(
        cast,
        lambda: cast.scene.commit("k", member_id, instance=instance, generation=generation, version=int(version or 8)),
        expected,
    )
    if expected == "REB":
        assert cast.scene.group is before


TXN_COMMIT = """
           | −1 nobody | −1 K | −1 U | −1 C | K   | K other generation | U   | P   | I   | F
missing    | ok        | ok   | ok   | ok   | GEN | GEN                | GEN | GEN | GEN | GEN
Empty      | ok        | ok   | ok   | ok   | UNK | UNK                | UNK | UNK | UNK | UNK
Preparing  | ok        | GEN  | UNK  | UNK  | ok  | GEN                | UNK | UNK | UNK | FEN
Completing | ok        | GEN  | UNK  | UNK  | ok  | GEN                | UNK | UNK | UNK | FEN
Stable     | ok        | GEN  | UNK  | UNK  | ok  | GEN                | UNK | UNK | UNK | FEN
Dead       | CNA       | CNA  | CNA  | CNA  | CNA | CNA                | CNA | CNA | CNA | CNA
"""


@pytest.mark.parametrize(("state", "column", "expected"), cells(TXN_COMMIT))
def test_txn_offset_commit(state: str, column: str, expected: str) -> None:
    cast = Cast(state)
    before = cast.scene.group
    who = column.removeprefix("−1 ")
    member_id, instance = ("", None) if who == "nobody" else identity(cast, who)
    generation = cast.scene.generation
    if column.startswith("−1"):
        generation = -1
    elif column == "K other generation":
        generation += 1
    check(cast, lambda: cast.scene.txn_commit("k", member_id, instance=instance, generation=generation), expected)
    if state != "missing":
        assert cast.scene.group is before, "a commit in a transaction keeps nobody alive"


LEAVE = """
           | nobody | "" + known instance | "" + unknown instance | P   | U   | I   | F   | K
missing    | UNK    | UNK                 | UNK                   | UNK | UNK | UNK | UNK | UNK
Empty      | UNK    | UNK                 | UNK                   | ok  | UNK | UNK | UNK | UNK
Preparing  | UNK    | ok                  | UNK                   | ok  | UNK | UNK | FEN | ok
Completing | UNK    | ok Preparing        | UNK                   | ok  | UNK | UNK | FEN | ok Preparing
Stable     | UNK    | ok Preparing        | UNK                   | ok  | UNK | UNK | FEN | ok Preparing
"""


@pytest.mark.parametrize(("state", "column", "expected"), cells(LEAVE))
def test_leave(state: str, column: str, expected: str) -> None:
    cast = Cast(state)
    before = cast.scene.group
    named = {"nobody": ("", None), '"" + known instance': ("", "is"), '"" + unknown instance': ("", "new")}
    asked = cast.scene.leave("x", named.get(column) or identity(cast, column))
    outcome, _, after = expected.partition(" ")
    assert (asked.error, asked.codes) == (ErrorCode.NONE, [CODES[outcome]])
    assert cast.scene.state.value.startswith(after or before.state.value)
    if outcome != "ok":
        assert cast.scene.group is before


DELETE = """
           | anybody
missing    | GNF
Empty      | ok Dead
Preparing  | NEG
Completing | NEG
Stable     | NEG
Dead       | GNF
"""


@pytest.mark.parametrize(("state", "column", "expected"), cells(DELETE))
def test_delete(state: str, column: str, expected: str) -> None:
    cast = Cast(state)
    check(cast, cast.scene.delete, expected)
