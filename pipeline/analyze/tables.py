"""All tables of an analysis, made from one journal in the order of their dependencies."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark import StorageLevel
from pyspark.sql import DataFrame

from pipeline.analyze import handoffs, invariants, members, offsets, ownership, rebalances
from pipeline.analyze.journal import Journal


@dataclass(frozen=True)
class Thresholds:
    """Settings of the analysis that a user may change."""

    storm_rebalances: int = 5
    storm_within_ms: int = 60_000
    lag_points: int = 400
    tolerance_ms: int = 1_000


@dataclass(frozen=True)
class Tables:
    """Tables that analysis writes, by name."""

    rebalance: DataFrame
    ownership: DataFrame
    lag: DataFrame
    handoff: DataFrame
    member_health: DataFrame
    storm: DataFrame
    violation: DataFrame

    def named(self) -> dict[str, DataFrame]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def analyze(journal: Journal, thresholds: Thresholds = Thresholds()) -> Tables:
    """Plan all tables of an analysis. Tables that several other tables need are persisted. All others are computed when
    they are used.
    """
    held = ownership.intervals(journal).persist(StorageLevel.MEMORY_AND_DISK)
    started = rebalances.rebalances(journal).persist(StorageLevel.MEMORY_AND_DISK)
    changes = ownership.belongings(journal).persist(StorageLevel.MEMORY_AND_DISK)
    moved = ownership.moves(changes)
    # The walk sorts all offsets, so its result is aggregated at once. Only a row per move is kept, not a row per
    # commit.
    stretches = offsets.takeovers(offsets.walk(journal, moved)).persist(StorageLevel.MEMORY_AND_DISK)
    handed = handoffs.handoffs(journal, moved, stretches, held)
    if journal.delivery is not None:
        handed = handoffs.with_exact(handed.persist(StorageLevel.MEMORY_AND_DISK), journal.delivery)
    whole = ownership.with_moves(started, journal, changes, held).persist(StorageLevel.MEMORY_AND_DISK)
    return Tables(
        rebalance=whole,
        ownership=held,
        lag=offsets.lag(journal.offset, points=thresholds.lag_points),
        handoff=handed,
        member_health=members.member_health(journal, started, held),
        storm=rebalances.storms(whole, at_least=thresholds.storm_rebalances, within_ms=thresholds.storm_within_ms),
        violation=invariants.violations(journal, held, moved, stretches, tolerance_ms=thresholds.tolerance_ms),
    )
