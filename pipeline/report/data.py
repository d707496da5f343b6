"""Collect the values that page and pictures show from the tables of an analysis; every list is bounded.

Groups with most trouble come first: by time without an owner, then by records processed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from pipeline.analyze.findings import Finding
from pipeline.analyze.tables import Tables

MOST_GROUPS = 12
MOST_PARTITIONS = 48
MOST_INTERVALS = 3_000
MOST_REBALANCES = 400
MOST_LINES = 8
MOST_MOVES = 200

COSTS = (("duplicates_min", "twice, at least"), ("duplicates_max", "twice, at most"), ("skipped", "passed over"))
COSTS_BY_MEMBERS = (("duplicates", "twice, say members' logs"), ("gap_records", "by nobody, say members' logs"))
"""Columns with the cost of a move. The journal yields lower and upper limits, and members' own logs
yield exact values.
"""


@dataclass
class Stretch:
    """An interval in which a member held the partition that this row of the chart shows."""

    row: int
    member: int
    from_ms: int
    to_ms: int


@dataclass
class GroupData:
    group_id: str
    begins_ms: int
    ends_ms: int
    rebalances: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    partitions: list[str] = field(default_factory=list[str])
    members: list[str] = field(default_factory=list[str])
    stretches: list[Stretch] = field(default_factory=list[Stretch])
    lag: list[tuple[str, list[tuple[int, int]]]] = field(default_factory=list[tuple[str, list[tuple[int, int]]]])
    """(topic-partition, [(ms, greatest lag)]). The partition with the greatest lag comes first."""
    moves: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    left_out: list[str] = field(default_factory=list[str])
    """Sentences about data that is not shown."""


def costs_of(moves: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the cost columns in which at least one of `moves` has a value, exact ones first. A limit that is zero
    everywhere is left out.
    """
    return [
        (name, words) for name, words in (*COSTS_BY_MEMBERS, *COSTS) if any(move.get(name) for move in moves)
    ]  # fmt: skip


def cost(move: dict[str, Any]) -> int:
    """Return the greatest proved cost of a move, in records. An upper limit proves no cost."""
    return max(move.get(name) or 0 for name, _ in (*COSTS_BY_MEMBERS, *COSTS) if name != "duplicates_max")


@dataclass
class ReportData:
    findings: list[Finding]
    totals: dict[str, int]
    groups: list[GroupData]
    groups_left_out: int
    source: str = "the coordinator's journal"


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
        F.count_distinct("group_id").alias("groups"),
        F.count("*").alias("rebalances"),
        F.coalesce(F.sum("unowned_partition_ms"), F.lit(0)).alias("unowned_partition_ms"),
    ).first()
    exact = "duplicates" in tables.handoff.columns
    handoff = tables.handoff.agg(
        F.count("*").alias("moves"),
        F.coalesce(F.sum("duplicates_min"), F.lit(0)).alias("duplicates_min"),
        F.count_if("forced").alias("forced"),
        *([F.coalesce(F.sum("duplicates"), F.lit(0)).alias("duplicates")] if exact else []),
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


def _by_group(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Return `rows` by group, each group's rows in their order."""
    for name, mine in groupby(rows, key=lambda row: row.group_id):
        yield name, list(mine)


def _first(table: DataFrame, most: int, *order: Column | str) -> list[Row]:
    """Return the first `most` rows of each group by one query, and one more row if a group has more."""
    rank = Window.partitionBy("group_id").orderBy(*order)
    return (
        table.withColumn("rank", F.row_number().over(rank))
        .where(F.col("rank") <= most + 1)
        .orderBy("group_id", "rank")
        .collect()
    )


def _add_rebalances(table: DataFrame, groups: dict[str, GroupData], names: Sequence[str]) -> None:
    for name, rows in _by_group(_first(_of(table, names), MOST_REBALANCES, "rebalance")):
        groups[name].rebalances = [row.asDict() for row in rows[:MOST_REBALANCES]]
        if len(rows) > MOST_REBALANCES:
            groups[name].left_out.append(f"rebalances after the first {MOST_REBALANCES:,}")


def _add_ownership(table: DataFrame, groups: dict[str, GroupData], names: Sequence[str]) -> None:
    known = _of(table, names).where(F.col("from_ms").isNotNull() | F.col("left_censored"))
    place = Window.partitionBy("group_id").orderBy("topic", "partition")
    placed = known.withColumn("place", F.dense_rank().over(place) - 1)
    for name, rows in _by_group(
        _first(placed.where(F.col("place") <= MOST_PARTITIONS), MOST_INTERVALS, F.coalesce("from_seq", F.lit(0)))
    ):
        group = groups[name]
        labels = {row.place: f"{row.topic}-{row.partition}" for row in rows}
        if len(labels) > MOST_PARTITIONS:
            group.left_out.append(f"partitions after the first {MOST_PARTITIONS}")
        if len(rows) > MOST_INTERVALS:
            group.left_out.append(f"ownership after the first {MOST_INTERVALS:,} stretches")
        shown = sorted(labels)[:MOST_PARTITIONS]
        lines = {place: number for number, place in enumerate(shown)}
        group.partitions = [labels[place] for place in shown]
        numbers: dict[str, int] = {}
        for row in rows[:MOST_INTERVALS]:
            if row.place not in lines:
                continue
            member = numbers.setdefault(row.member_id, len(numbers))
            from_ms = group.begins_ms if row.from_ms is None else row.from_ms
            to_ms = group.ends_ms if row.to_ms is None else row.to_ms
            group.stretches.append(Stretch(lines[row.place], member, from_ms, max(from_ms, to_ms)))
        group.members = list(numbers)


def _add_lag(table: DataFrame, groups: dict[str, GroupData], names: Sequence[str]) -> None:
    mine = _of(table, names)
    worst = _first(
        mine.groupBy("group_id", "topic", "partition").agg(F.max("lag_max").alias("worst")),
        MOST_LINES,
        F.desc("worst"),
        "topic",
        "partition",
    )
    chosen: dict[tuple[str, str, int], list[tuple[int, int]]] = {}
    for name, rows in _by_group(worst):
        if len(rows) > MOST_LINES:
            groups[name].left_out.append(f"lag of all but the {MOST_LINES} partitions that were most behind")
        chosen |= {(name, row.topic, row.partition): [] for row in rows[:MOST_LINES]}
    if not chosen:
        return
    wanted = table.sparkSession.createDataFrame(list(chosen), "group_id string, topic string, partition int")
    for row in mine.join(F.broadcast(wanted), ["group_id", "topic", "partition"]).orderBy("bucket_ms").collect():
        chosen[row.group_id, row.topic, row.partition].append((row.bucket_ms, row.lag_max))
    for (name, topic, partition), line in chosen.items():
        group = groups[name]
        group.lag.append((f"{topic}-{partition}", line))
        group.begins_ms = min(group.begins_ms, line[0][0])
        group.ends_ms = max(group.ends_ms, line[-1][0])


def _add_moves(table: DataFrame, groups: dict[str, GroupData], names: Sequence[str]) -> None:
    exact = ("duplicates", "gap_records") if "duplicates" in table.columns else ()
    size = F.greatest(*(F.coalesce(name, F.lit(0)) for name in ("duplicates_min", "skipped", *exact)))
    for name, rows in _by_group(_first(_of(table, names), MOST_MOVES, F.desc(size), "move_seq")):
        if len(rows) > MOST_MOVES:
            groups[name].left_out.append(f"moves but for the {MOST_MOVES} that cost most")
        groups[name].moves = sorted((row.asDict() for row in rows[:MOST_MOVES]), key=lambda move: move["move_seq"])


def delivery_data(delivered: DataFrame, findings: list[Finding]) -> ReportData:
    """Collect owners and records processed twice from the members' own logs, for an analysis without a journal."""
    moved = F.col("stint") > 1
    trouble = delivered.groupBy("group_id").agg(
        F.count_distinct("member_id").alias("members"),
        F.count_if(moved).alias("moves"),
        F.coalesce(F.sum(F.when(moved, F.col("duplicates"))), F.lit(0)).alias("twice"),
    )
    names = [row.group_id for row in trouble.orderBy(F.desc("twice"), "group_id").limit(MOST_GROUPS).collect()]
    found: dict[str, GroupData] = {}
    for name, rows in _by_group(_first(_of(delivered, names), MOST_INTERVALS, "begins_ms", "topic", "partition")):
        mine = rows[:MOST_INTERVALS]
        group = found[name] = GroupData(name, min(row.begins_ms for row in mine), max(row.ends_ms for row in mine))
        labels = [f"{topic}-{partition}" for topic, partition in sorted({(row.topic, row.partition) for row in mine})]
        group.partitions = labels[:MOST_PARTITIONS]
        group.members = list(dict.fromkeys(row.member_id for row in mine))
        if len(labels) > MOST_PARTITIONS:
            group.left_out.append(f"partitions after the first {MOST_PARTITIONS}")
        if len(rows) > MOST_INTERVALS:
            group.left_out.append(f"ownership after the first {MOST_INTERVALS:,} stretches")
        earlier: dict[str, str] = {}
        for row in mine:
            label = f"{row.topic}-{row.partition}"
            if label in group.partitions:
                place = group.partitions.index(label)
                group.stretches.append(Stretch(place, group.members.index(row.member_id), row.begins_ms, row.ends_ms))
            if label in earlier:
                group.moves.append(
                    {
                        **row.asDict(),
                        "duplicates_min": row.duplicates,
                        "duplicates_max": row.duplicates,
                        "skipped": row.gap_records,
                        "source_member_id": earlier[label],
                        "target_member_id": row.member_id,
                        "move_seq": len(group.moves),
                    }
                )
            earlier[label] = row.member_id
    totals = dict.fromkeys(("rebalances", "unowned_partition_ms", "forced", "storms", "violations"), 0)
    sums = trouble.agg(
        F.count("*").alias("groups"),
        *(
            F.coalesce(F.sum(name), F.lit(0)).alias(total)
            for name, total in (("members", "members"), ("moves", "moves"), ("twice", "duplicates_min"))
        ),
    ).first()
    assert sums is not None
    totals |= sums.asDict()
    return ReportData(
        findings,
        totals,
        [found[name] for name in names],
        totals["groups"] - len(names),
        "the members' own logs: there is no journal",
    )
