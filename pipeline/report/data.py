"""What the page and the pictures show, taken from the tables of an analysis: plain values, every list bounded.

Groups are shown in the order of trouble: time without an owner, then records processed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.analyze.findings import Finding
from pipeline.analyze.tables import Tables

MOST_GROUPS = 12
MOST_PARTITIONS = 48
MOST_INTERVALS = 3_000
MOST_REBALANCES = 400
MOST_LINES = 8
MOST_MOVES = 200


@dataclass
class Stretch:
    """A member held the partition of this row from one moment to another."""

    row: int
    member: int
    from_ms: int
    to_ms: int


@dataclass
class GroupData:
    group_id: str
    begins_ms: int
    ends_ms: int
    rebalances: list[dict[str, Any]] = field(default_factory=list)
    partitions: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    lag: list[tuple[str, list[tuple[int, int]]]] = field(default_factory=list)
    """(topic-partition, [(ms, greatest lag)]), the most behind first."""
    moves: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What is not shown, in words."""


@dataclass
class ReportData:
    findings: list[Finding]
    totals: dict[str, int]
    groups: list[GroupData]
    groups_left_out: int


def report_data(tables: Tables, findings: list[Finding]) -> ReportData:
    trouble = (
        tables.rebalance.groupBy("group_id")
        .agg(
            F.sum("unowned_partition_ms").alias("idle"),
            F.count("*").alias("rebalances"),
            F.min("started_ms").alias("begins"),
            F.max(F.coalesce("ended_ms", "started_ms")).alias("ends"),
        )
        .join(tables.handoff.groupBy("group_id").agg(F.sum("duplicates_min").alias("twice")), "group_id", "left")
        .orderBy(F.desc("idle"), F.desc(F.coalesce("twice", F.lit(0))), "group_id")
    )
    shown = trouble.limit(MOST_GROUPS).collect()
    groups = {row.group_id: GroupData(row.group_id, row.begins, row.ends) for row in shown}
    names = list(groups)
    _add_rebalances(tables.rebalance, groups, names)
    _add_lag(tables.lag, groups, names)
    _add_ownership(tables.ownership, groups, names)
    _add_moves(tables.handoff, groups, names)
    return ReportData(findings, _totals(tables), list(groups.values()), max(0, trouble.count() - len(shown)))


def _totals(tables: Tables) -> dict[str, int]:
    rebalance = tables.rebalance.agg(
        F.countDistinct("group_id").alias("groups"),
        F.count("*").alias("rebalances"),
        F.coalesce(F.sum("unowned_partition_ms"), F.lit(0)).alias("unowned_partition_ms"),
    ).first()
    handoff = tables.handoff.agg(
        F.count("*").alias("moves"),
        F.coalesce(F.sum("duplicates_min"), F.lit(0)).alias("duplicates_min"),
        F.count_if("forced").alias("forced"),
    ).first()
    assert rebalance is not None
    assert handoff is not None
    return {
        **rebalance.asDict(),
        **handoff.asDict(),
        "storms": tables.storm.count(),
        "members": tables.member_health.count(),
        "violations": tables.violation.count(),
    }


def _of(table: DataFrame, names: Sequence[str]) -> DataFrame:
    return table.where(F.col("group_id").isin(list(names)))


def _add_rebalances(table: DataFrame, groups: dict[str, GroupData], names: Sequence[str]) -> None:
    for name in names:
        rows = _of(table, [name]).orderBy("rebalance").limit(MOST_REBALANCES + 1).collect()
        groups[name].rebalances = [row.asDict() for row in rows[:MOST_REBALANCES]]
        if len(rows) > MOST_REBALANCES:
            groups[name].left_out.append(f"rebalances after the first {MOST_REBALANCES:,}")


def _add_ownership(table: DataFrame, groups: dict[str, GroupData], names: Sequence[str]) -> None:
    for name in names:
        group = groups[name]
        held = _of(table, [name]).where(F.col("from_ms").isNotNull() | F.col("left_censored"))
        labels = held.select("topic", "partition").distinct().orderBy("topic", "partition").limit(MOST_PARTITIONS + 1)
        partitions = [(row.topic, row.partition) for row in labels.collect()]
        if len(partitions) > MOST_PARTITIONS:
            group.left_out.append(f"partitions after the first {MOST_PARTITIONS}")
            partitions = partitions[:MOST_PARTITIONS]
        rows = {partition: number for number, partition in enumerate(partitions)}
        group.partitions = [f"{topic}-{partition}" for topic, partition in partitions]
        found = held.orderBy(F.coalesce("from_seq", F.lit(0))).limit(MOST_INTERVALS + 1).collect()
        if len(found) > MOST_INTERVALS:
            group.left_out.append(f"ownership after the first {MOST_INTERVALS:,} stretches")
        numbers: dict[str, int] = {}
        for row in found[:MOST_INTERVALS]:
            place = rows.get((row.topic, row.partition))
            if place is None:
                continue
            member = numbers.setdefault(row.member_id, len(numbers))
            from_ms = group.begins_ms if row.from_ms is None else row.from_ms
            to_ms = group.ends_ms if row.to_ms is None else row.to_ms
            group.stretches.append(Stretch(place, member, from_ms, max(from_ms, to_ms)))
        group.members = list(numbers)


def _add_lag(table: DataFrame, groups: dict[str, GroupData], names: Sequence[str]) -> None:
    for name in names:
        group = groups[name]
        mine = _of(table, [name])
        worst = (
            mine.groupBy("topic", "partition").agg(F.max("lag_max").alias("worst")).orderBy(F.desc("worst"), "topic", "partition")
            .limit(MOST_LINES + 1).collect()
        )  # fmt: skip
        if len(worst) > MOST_LINES:
            group.left_out.append(f"lag of all but the {MOST_LINES} partitions that were most behind")
        for row in worst[:MOST_LINES]:
            points = mine.where((F.col("topic") == row.topic) & (F.col("partition") == row.partition)).orderBy("bucket_ms").collect()
            line = [(point.bucket_ms, point.lag_max) for point in points]
            group.lag.append((f"{row.topic}-{row.partition}", line))
            group.begins_ms = min(group.begins_ms, line[0][0])
            group.ends_ms = max(group.ends_ms, line[-1][0])


def _add_moves(table: DataFrame, groups: dict[str, GroupData], names: Sequence[str]) -> None:
    exact = ("duplicates", "gap_records") if "duplicates" in table.columns else ()
    size = F.greatest(*(F.coalesce(name, F.lit(0)) for name in ("duplicates_min", "skipped", *exact)))
    for name in names:
        rows = _of(table, [name]).orderBy(F.desc(size), "move_seq").limit(MOST_MOVES + 1).collect()
        if len(rows) > MOST_MOVES:
            groups[name].left_out.append(f"moves but for the {MOST_MOVES} that cost most")
        groups[name].moves = sorted((row.asDict() for row in rows[:MOST_MOVES]), key=lambda move: move["move_seq"])
