"""Findings: the sentences with figures that a person reads first.

The one idea: a finding is made from a small aggregate. The finding names its subject, its figures and the next step. No
row of the journal is sent to the Spark driver, and the length of every list is limited.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.analyze.tables import Tables, Thresholds

SEVERITIES = ("violation", "warning", "note")
MOST_OF_A_KIND = 20


@dataclass(frozen=True)
class Finding:
    """`severity` is violation (the gateway or its journal is wrong), warning (the operator should act) or note."""

    severity: str
    kind: str
    group_id: str | None
    says: str
    numbers: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def seconds(ms: float) -> str:
    if ms < 1_000:
        return f"{ms:.0f} ms"
    if ms < 120_000:
        return f"{ms / 1_000:.1f} s"
    if ms < 7_200_000:
        return f"{ms / 60_000:.0f} min"
    return f"{ms / 3_600_000:.1f} h"


def counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def findings(tables: Tables, thresholds: Thresholds) -> list[Finding]:
    """Return all findings, the most severe first."""
    found = [
        *_violations(tables),
        *_storms(tables, thresholds),
        *_groups(tables),
        *_slow_joiners(tables),
        *_handoffs(tables),
        *_unwell_members(tables),
        *_lags(tables),
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _violations(tables: Tables) -> Iterator[Finding]:
    rows = (
        tables.violation.groupBy("check")
        .agg(
            F.count("*").alias("times"),
            F.min_by(F.struct("group_id", "topic", "partition", "says", "seq"), "seq").alias("example"),
        )
        .orderBy("check")
        .collect()
    )
    for row in rows:
        example = row.example
        where = f" in group {example.group_id}" if example.group_id else ""
        place = f", {example.topic}-{example.partition}" if example.topic else ""
        yield Finding(
            "violation",
            row.check,
            example.group_id,
            f"The rule {row.check} is broken {counted(row.times, 'time')}, first{where}{place}: {example.says}. "
            "This is a fault of the gateway or of its journal, not of a consumer: keep the journal and report it.",
            {"times": row.times, "seq": example.seq},
        )


def _storms(tables: Tables, thresholds: Thresholds) -> Iterator[Finding]:
    rows = tables.storm.orderBy(F.desc("rebalances"), "group_id", "started_ms").limit(MOST_OF_A_KIND).collect()
    for row in rows:
        length = seconds(row.ended_ms - row.started_ms)
        usual = f"most often because of {row.usual_reason}" if row.usual_reason else "for no stated reason"
        by = f" by {row.usual_member_id}" if row.trigger_members == 1 else f" by {row.trigger_members} members"
        yield Finding(
            "warning",
            "storm",
            row.group_id,
            f"Group {row.group_id} rebalanced {row.rebalances:,} times in {length}, {usual}{by}; partitions "
            "lay idle for "
            f"{seconds(row.unowned_partition_ms)} in sum. Give members a group.instance.id (static "
            "membership), and look at "
            "what restarts them.",
            {
                "rebalances": row.rebalances,
                "started_ms": row.started_ms,
                "ended_ms": row.ended_ms,
                "unowned_partition_ms": row.unowned_partition_ms,
                "within_ms": thresholds.storm_within_ms,
            },
        )


def _groups(tables: Tables) -> Iterator[Finding]:
    completed = F.col("outcome") == "completed"
    rows = (
        tables.rebalance.groupBy("group_id")
        .agg(
            F.count("*").alias("rebalances"),
            F.count_if(F.col("outcome") == "superseded").alias("superseded"),
            F.percentile(F.when(completed, F.col("duration_ms")), 0.5).alias("usual_ms"),
            F.max(F.when(completed, F.col("duration_ms"))).alias("longest_ms"),
            F.sum("unowned_partition_ms").alias("unowned_partition_ms"),
            F.sum("partitions_moved").alias("moved"),
            F.sum("minimum_moves").alias("least"),
            F.max("protocol_name").alias("protocol_name"),
        )
        .orderBy(F.desc("unowned_partition_ms"), "group_id")
        .limit(MOST_OF_A_KIND)
        .collect()
    )
    for row in rows:
        moved, least = row.moved or 0, row.least or 0
        if row.usual_ms is not None:
            cut = f", {row.superseded:,} of them cut short by the next" if row.superseded else ""
            yield Finding(
                "note",
                "rebalances",
                row.group_id,
                f"Group {row.group_id} rebalanced {counted(row.rebalances, 'time')}{cut}: "
                f"{seconds(row.usual_ms)} each at the "
                f"median, {seconds(row.longest_ms)} at most. Partitions had no owner for "
                f"{seconds(row.unowned_partition_ms)} in sum.",
                {
                    "rebalances": row.rebalances,
                    "superseded": row.superseded,
                    "median_ms": row.usual_ms,
                    "longest_ms": row.longest_ms,
                    "unowned_partition_ms": row.unowned_partition_ms,
                },
            )
        if moved > least:
            yield Finding(
                "warning" if moved - least >= 10 and moved >= 2 * least else "note",
                "needless_moves",
                row.group_id,
                f"Group {row.group_id} moved {counted(moved, 'partition')} where {least:,} would have done "
                f"(assignor {row.protocol_name}). cooperative-sticky, or group.protocol=consumer, moves the least.",
                {"partitions_moved": moved, "minimum_moves": least},
            )


def _slow_joiners(tables: Tables) -> Iterator[Finding]:
    with_members = tables.rebalance.where(F.col("last_member_id").isNotNull() & (F.col("members_after") > 1))
    whole = with_members.groupBy("group_id").agg(F.count("*").alias("rebalances"))
    rows = (
        tables.member_health.where("times_last >= 3")
        .join(whole, "group_id")
        .where((F.col("times_last") * 2 >= F.col("rebalances")) & (F.col("last_join_wait_p50_ms") >= 500))
        .select(
            "group_id", "member_id", "client_id", "client_host", "times_last", "rebalances", "last_join_wait_p50_ms"
        )
        .orderBy(F.desc("last_join_wait_p50_ms"))
        .limit(MOST_OF_A_KIND)
        .collect()
    )
    for row in rows:
        yield Finding(
            "warning",
            "last_to_join",
            row.group_id,
            f"Member {row.member_id} ({row.client_id} at {row.client_host}) joined last in {row.times_last} of "
            f"{row.rebalances} rebalances of group {row.group_id}, {seconds(row.last_join_wait_p50_ms)} each "
            "at the median: "
            "all others waited for it. Its poll loop is slow: lower max.poll.records or move work out of the loop.",
            {"times_last": row.times_last, "rebalances": row.rebalances, "median_wait_ms": row.last_join_wait_p50_ms},
        )


def _handoffs(tables: Tables) -> Iterator[Finding]:
    exact = "duplicates" in tables.handoff.columns
    sums = [
        F.count("*").alias("moves"),
        F.sum("duplicates_min").alias("at_least"),
        F.sum("duplicates_max").alias("at_most"),
        F.count_if(F.col("duplicates_min") > 0).alias("moves_with_duplicates"),
        F.count_if("forced").alias("forced"),
        F.sum("skipped").alias("skipped"),
        F.max_by(F.struct("topic", "partition", "source_member_id", "duplicates_min"), "duplicates_min").alias("worst"),
        F.max_by("source_member_id", F.when(F.col("forced"), F.col("wait_ms"))).alias("stuck_member_id"),
        F.sum(F.when(F.col("forced"), F.col("wait_ms"))).alias("forced_wait_ms"),
    ]
    if exact:
        sums += [F.sum("duplicates").alias("duplicates"), F.sum("gap_records").alias("gap_records")]
    rows = tables.handoff.groupBy("group_id").agg(*sums).orderBy(F.desc("at_least"), "group_id").limit(MOST_OF_A_KIND)
    for row in rows.collect():
        if row.at_least:
            upper = f", at most {row.at_most:,}" if (row.at_most or 0) > row.at_least else ""
            yield Finding(
                "warning",
                "duplicates",
                row.group_id,
                f"Group {row.group_id} processed at least {counted(row.at_least, 'record')} twice{upper}, in "
                f"{row.moves_with_duplicates:,} of {counted(row.moves, 'move')}; the worst was "
                f"{row.worst.topic}-{row.worst.partition}, which {row.worst.source_member_id} had processed "
                f"{counted(row.worst.duplicates_min, 'record')} beyond its last commit. Commit in the revoke "
                "callback, or "
                "set group.handoff.mode=drain.",
                {"at_least": row.at_least, "at_most": row.at_most, "moves": row.moves},
            )
        if exact and (row.duplicates or row.gap_records):
            yield Finding(
                "warning",
                "processed",
                row.group_id,
                f"By the members' own logs, moves in group {row.group_id} had {counted(row.duplicates or 0, 'record')} "
                f"processed twice and {counted(row.gap_records or 0, 'record')} processed by nobody.",
                {"duplicates": row.duplicates, "gap_records": row.gap_records},
            )
        if row.skipped:
            yield Finding(
                "warning",
                "skipped",
                row.group_id,
                f"New owners in group {row.group_id} began {counted(row.skipped, 'record')} beyond what was "
                "committed: these "
                "were passed over. A consumer seeks, or auto.offset.reset=latest met an offset that is not there.",
                {"skipped": row.skipped},
            )
        if row.forced:
            yield Finding(
                "warning",
                "forced",
                row.group_id,
                f"{counted(row.forced, 'handoff')} in group {row.group_id} had to be forced after "
                f"{seconds(row.forced_wait_ms)} of waiting in sum, {row.stuck_member_id} being the one waited "
                "for longest: "
                "it neither committed nor released its partition in time.",
                {"forced": row.forced, "forced_wait_ms": row.forced_wait_ms},
            )


def delivery_findings(delivered: DataFrame) -> list[Finding]:
    """Return findings from the logs that members write themselves, for an analysis without a journal."""
    rows = (
        delivered.groupBy("group_id")
        .agg(
            F.sum("records").alias("records"),
            F.sum("duplicates").alias("duplicates"),
            F.sum("gap_records").alias("gap_records"),
            F.count("*").alias("stints"),
            F.max(F.struct("duplicates", "topic", "partition", "member_id")).alias("worst"),
        )
        .orderBy(F.desc(F.col("duplicates") + F.col("gap_records")), "group_id")
        .limit(MOST_OF_A_KIND)
        .collect()
    )
    told: list[Finding] = []
    for row in rows:
        worst = (
            f"; the worst was {row.worst.topic}-{row.worst.partition}, where {row.worst.member_id} repeated "
            f"{row.worst.duplicates:,}"
            if row.duplicates
            else ""
        )
        told.append(
            Finding(
                "warning" if row.duplicates or row.gap_records else "note",
                "processed",
                row.group_id,
                f"Members of group {row.group_id} processed {counted(row.records, 'record')} in {row.stints:,} turns: "
                f"{row.duplicates:,} twice, {row.gap_records:,} by nobody{worst}.",
                {"records": row.records, "duplicates": row.duplicates, "gap_records": row.gap_records},
            )
        )
    return told


def _unwell_members(tables: Tables) -> Iterator[Finding]:
    rows = (
        tables.member_health.where(
            (F.col("expiries") > 0) | (F.col("flapping_per_h") >= 6) | (F.col("broken_rules") > 0)
        )
        .orderBy(F.desc("flapping_per_h"), "group_id", "member_id")
        .limit(MOST_OF_A_KIND)
        .collect()
    )
    for row in rows:
        told: list[str] = []
        if row.expiries:
            silence = (
                f" after silences of up to {seconds(row.heartbeat_gap_max_ms)}" if row.heartbeat_gap_max_ms else ""
            )
            told.append(f"was thrown out {counted(row.expiries, 'time')}{silence}")
        if row.flapping_per_h >= 6 and row.comings > 1:
            told.append(f"came {row.comings:,} times, which makes {row.flapping_per_h:,.0f} comings and goings an hour")
        if row.broken_rules:
            told.append(f"broke {counted(row.broken_rules, 'rule')} of the cooperative protocol")
        if told:
            yield Finding(
                "warning" if row.expiries or row.broken_rules else "note",
                "member",
                row.group_id,
                f"Member {row.member_id} ({row.client_id} at {row.client_host}) of group {row.group_id} "
                f"{' and '.join(told)}.",
                {"expiries": row.expiries, "joins": row.joins, "flapping_per_h": row.flapping_per_h},
            )


def _lags(tables: Tables) -> Iterator[Finding]:
    rows = (
        tables.lag.groupBy("group_id", "topic", "partition")
        .agg(
            F.max("lag_max").alias("worst"),
            F.max("time_lag_max_ms").alias("oldest_ms"),
            F.max_by("lag_last", "bucket_ms").alias("now"),
            F.min_by("lag_last", "bucket_ms").alias("then"),
        )
        .groupBy("group_id")
        .agg(
            F.sum("now").alias("now"),
            F.sum("then").alias("then"),
            F.max(F.struct("worst", "topic", "partition", "oldest_ms")).alias("most"),
        )
        .where("most.worst > 0")
        .orderBy(F.desc("now"))
        .limit(MOST_OF_A_KIND)
        .collect()
    )
    for row in rows:
        grows = row.now > 2 * max(row.then, 1) and row.now >= 1_000
        age = (
            f", when the oldest unread record was at least {seconds(row.most.oldest_ms)} old"
            if row.most.oldest_ms
            else ""
        )
        yield Finding(
            "warning" if grows else "note",
            "lag",
            row.group_id,
            f"Group {row.group_id} is {counted(row.now, 'record')} behind at its last commits"
            f"{', and falling further behind' if grows else ''}; {row.most.topic}-{row.most.partition} was "
            f"{row.most.worst:,} behind at its worst{age}.",
            {"records_behind": row.now, "worst": row.most.worst, "oldest_ms": row.most.oldest_ms},
        )
