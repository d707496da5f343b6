"""The analysis agrees exactly with journals whose correct findings are known, and finds violations of rules."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
from pyspark.sql import SparkSession

from pipeline.analyze.invariants import rows_missing
from pipeline.analyze.tables import Tables, analyze
from tests.pipeline.journals import journal_of
from tests.pipeline.planted import Row, Truth, journal

pytestmark = pytest.mark.usefixtures("interpreted")

Rows = dict[str, list[Row]]


@pytest.fixture(scope="module", params=[1, 2])
def planted(request: pytest.FixtureRequest, spark: SparkSession) -> tuple[Tables, dict[str, Truth]]:
    rows, truths = journal(request.param)
    return analyze(journal_of(spark, rows)), truths


def test_rebalances_and_what_they_cost(planted: tuple[Tables, dict[str, Truth]]) -> None:
    tables, truths = planted
    found = tables.rebalance.collect()
    for group_id, truth in truths.items():
        mine = [row for row in found if row.group_id == group_id]
        assert len(mine) == truth.rebalances
        assert Counter(row.outcome for row in mine) == truth.outcomes
        assert sum(row.partitions_moved or 0 for row in mine) == truth.partitions_moved
        assert sum(row.minimum_moves or 0 for row in mine) == truth.minimum_moves
        assert sum(row.unowned_partition_ms for row in mine) == truth.unowned_partition_ms


def test_handoffs(planted: tuple[Tables, dict[str, Truth]]) -> None:
    tables, truths = planted
    found = tables.handoff.collect()
    for group_id, truth in truths.items():
        mine = [row for row in found if row.group_id == group_id]
        assert len(mine) == truth.partitions_moved
        assert sum(row.duplicates_min for row in mine) == truth.duplicates_min
        assert sum(row.duplicates_max or 0 for row in mine) == truth.duplicates_max
        assert sum(row.duplicates or 0 for row in mine) == truth.duplicates
        assert sum(row.gap_records or 0 for row in mine) == truth.gap_records
        assert sum(row.skipped for row in mine) == truth.skipped
        assert sum(row.forced for row in mine) == truth.forced
        assert {row.ended_reason for row in mine if row.forced} == ({"timeout"} if truth.forced else set())


def test_storms(planted: tuple[Tables, dict[str, Truth]]) -> None:
    tables, truths = planted
    found = tables.storm.collect()
    for group_id, truth in truths.items():
        mine = [(row.first_rebalance, row.rebalances) for row in found if row.group_id == group_id]
        assert sorted(mine) == truth.storms


def test_members(planted: tuple[Tables, dict[str, Truth]]) -> None:
    tables, truths = planted
    found = tables.member_health.collect()
    for group_id, truth in truths.items():
        mine = {row.member_id: row for row in found if row.group_id == group_id}
        assert {name: row.times_last for name, row in mine.items() if row.times_last} == truth.times_last
        assert sum(row.commits for row in mine.values()) == truth.accepted_commits
        assert sum(row.refused_commits for row in mine.values()) == truth.refused_commits


def test_who_owns_what_at_the_end(planted: tuple[Tables, dict[str, Truth]]) -> None:
    tables, truths = planted
    found = tables.ownership.where("to_seq is null").collect()
    for group_id, truth in truths.items():
        assert {row.partition: row.member_id for row in found if row.group_id == group_id} == truth.owned


def test_a_right_journal_breaks_no_rule(planted: tuple[Tables, dict[str, Truth]]) -> None:
    assert planted[0].violation.collect() == []


# --- a rule broken on purpose -----------------------------------------------------------------------------------------


def _lose_a_row(rows: Rows) -> None:
    del rows["journal_offset"][len(rows["journal_offset"]) // 2]


def _number_twice(rows: Rows) -> None:
    rows["journal_offset"][5]["seq"] = rows["journal_offset"][6]["seq"]


def _go_back(rows: Rows) -> None:
    made = [row for row in rows["journal_event"] if row["kind"] == "generation_created"]
    made[2]["generation_id"] = made[1]["generation_id"]


def _jump(rows: Rows) -> None:
    completed = [row for row in rows["journal_event"] if row["kind"] == "assignment_stored"]
    completed[1]["state_after"] = "Empty"


def _assign_twice(rows: Rows) -> None:
    given = [row for row in rows["journal_ownership"] if row["change"] == "assigned"]
    other = next(
        row
        for row in given
        if row["generation_id"] == given[-1]["generation_id"]
        and row["member_id"] != given[-1]["member_id"]
        and row["group_id"] == given[-1]["group_id"]
    )
    other["partition"] = given[-1]["partition"]


def _assign_to_nobody(rows: Rows) -> None:
    given = [row for row in rows["journal_ownership"] if row["change"] == "assigned"]
    given[-1]["member_id"] = "a-stranger"


def _keep_holding(rows: Rows) -> None:
    """Return rows in which one release is missing, although another member takes the partition next."""
    ownership = rows["journal_ownership"]
    for position, row in enumerate(ownership):
        same = [
            o
            for o in ownership[position + 1 :]
            if (o["group_id"], o["partition"]) == (row["group_id"], row["partition"])
        ]
        if row["change"] == "released" and same and same[0]["member_id"] != row["member_id"]:
            row["topic"] = "another-topic"
            return
    raise AssertionError("nothing moves")


def _accept_the_old_generation(rows: Rows) -> None:
    refused = next(row for row in rows["journal_offset"] if row["error_code"])
    refused["error_code"] = 0
    refused["at_ms"] += 60_000


def _accept_what_never_was(rows: Rows) -> None:
    accepted = [row for row in rows["journal_offset"] if row["kind"] == "commit" and not row["error_code"]]
    accepted[-1]["generation_id"] = 4_711


def _tell_another_offset(rows: Rows) -> None:
    told = [row for row in rows["journal_offset"] if row["kind"] == "fetch" and row["offset"] > 0]
    told[-1]["offset"] -= 1


def _take_before_let_go(rows: Rows) -> None:
    ended = next(row for row in rows["journal_handoff"] if row["phase"] == "ended")
    told = next(
        row
        for row in rows["journal_event"]
        if (row["kind"], row["member_id"]) == ("member_synced", ended["target_member_id"]) and row["seq"] > ended["seq"]
    )
    ended["seq"], told["seq"] = told["seq"], ended["seq"]


def _end_twice(rows: Rows) -> None:
    begun = next(row for row in rows["journal_handoff"] if row["phase"] == "begun")
    begun.update(phase="ended", reason="acked")


BROKEN_IN_A_GROUP: dict[Callable[[Rows], None], str] = {
    _go_back: "generation_went_back",
    _jump: "state_jumped",
    _assign_twice: "assigned_twice",
    _assign_to_nobody: "assigned_to_nobody",
    _keep_holding: "two_owners",
    _accept_the_old_generation: "commit_of_another_generation",
    _accept_what_never_was: "commit_of_another_generation",
    _tell_another_offset: "told_another_offset",
    _take_before_let_go: "handoff_not_kept",
    _end_twice: "handoff_not_kept",
}


@pytest.fixture(scope="module")
def right() -> Rows:
    return journal(7, groups=2)[0]


def test_every_broken_rule_is_found_and_no_other(spark: SparkSession) -> None:
    """Return one journal of many groups. In each group except the first, one rule is violated."""
    rows, truths = journal(11, groups=len(BROKEN_IN_A_GROUP) + 1)
    untouched, *groups = truths
    for group_id, sabotage in zip(groups, BROKEN_IN_A_GROUP, strict=True):
        sabotage({name: [row for row in table if row["group_id"] == group_id] for name, table in rows.items()})
    found: dict[str | None, set[str]] = {}
    for row in analyze(journal_of(spark, rows)).violation.collect():
        found.setdefault(row.group_id, set()).add(row.check)
    for group_id, (sabotage, expected) in zip(groups, BROKEN_IN_A_GROUP.items(), strict=True):
        assert expected in found.pop(group_id, set()), sabotage.__name__
    assert found == {}, untouched


@pytest.mark.parametrize("sabotage", [_lose_a_row, _number_twice])
def test_a_row_that_is_missing_or_there_twice_is_found(
    spark: SparkSession, right: Rows, sabotage: Callable[[Rows], None]
) -> None:
    broken = copy.deepcopy(right)
    sabotage(broken)
    assert [row.check for row in rows_missing(journal_of(spark, broken)).collect()] == ["rows_missing"]
    assert rows_missing(journal_of(spark, right)).collect() == []


def test_nothing_is_concluded_across_dropped_rows(spark: SparkSession, right: Rows) -> None:
    """Rows in the middle of the journal are lost, and the writer reports that. Rules that need complete rows must then
    report nothing.
    """
    torn = copy.deepcopy(right)
    numbers = sorted(row["seq"] for name, rows in torn.items() if name != "delivery" for row in rows)
    first, last = numbers[len(numbers) // 3], numbers[len(numbers) // 2]
    for name in torn:
        if name != "delivery":
            torn[name] = [row for row in torn[name] if not first <= row["seq"] < last]
    torn["journal_event"].append(
        {"seq": last - 1, "at_ms": torn["journal_event"][0]["at_ms"], "node_id": 1, "group_id": "", "group_type": "",
         "kind": "rows_dropped", "generation_id": -1, "row_count": last - first}
    )  # fmt: skip
    for name in torn:
        for row in torn[name]:
            if "seq" in row and row["seq"] >= last:
                row["seq"] -= last - first - 1
            elif row.get("kind") == "rows_dropped":
                row["seq"] = first
    found = analyze(journal_of(spark, torn)).violation.collect()
    assert found == []
