"""Invariants of every journal, for any client behaviour: each row found here is a fault of the coordinator or of the
journal, never of a user's consumer.

The one idea: a check is a function of the journal, or of tables that were made from it, and returns rows of one shape.
So the job is also the test of every long run: any row leads to exit code 3.

Postgres decides whether a commit succeeds, and the commit is journaled when Postgres' answer is known. So the row of a
commit may come up to `tolerance_ms` after the row of a newer generation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from pipeline.analyze.journal import Journal
from pipeline.analyze.offsets import told_otherwise, walk

FIELDS = ("check", "group_id", "topic", "partition", "generation_id", "seq", "at_ms", "says")

CLASSIC_TRANSITIONS = {
    "Empty": ("PreparingRebalance", "Dead"),
    "PreparingRebalance": ("CompletingRebalance", "Empty", "Dead"),
    "CompletingRebalance": ("Stable", "PreparingRebalance", "Dead"),
    "Stable": ("PreparingRebalance", "Dead"),
}
"""Allowed successors of each state of a classic group, as in Kafka's coordinator."""


def _rows(check: str, found: DataFrame, says: Column) -> DataFrame:
    """Return the rows of a check in the common form. Columns that `found` lacks are null."""
    kinds = {
        "group_id": "string",
        "topic": "string",
        "partition": "int",
        "generation_id": "int",
        "seq": "long",
        "at_ms": "long",
    }
    columns = [
        (F.col(name) if name in found.columns else F.lit(None)).cast(kind).alias(name) for name, kind in kinds.items()
    ]
    return found.select(F.lit(check).alias("check"), *columns, says.cast("string").alias("says"))


def rows_missing(journal: Journal) -> DataFrame:
    """Check that every number of the range exists exactly once."""
    counted = None
    for table in (journal.event, journal.member, journal.ownership, journal.offset, journal.handoff):
        part = table.agg(F.count("*").alias("rows"), F.sum(F.col("seq").cast("decimal(38,0)")).alias("total"))
        counted = part if counted is None else counted.unionByName(part)
    assert counted is not None
    expected = journal.next_seq - journal.first_seq
    # The sum shows if one number occurs twice and another is missing. In a count these two errors would cancel out.
    sum_expected = (journal.first_seq + journal.next_seq - 1) * expected // 2
    summed = counted.agg(F.sum("rows").alias("rows"), F.sum("total").alias("total"))
    return _rows(
        "rows_missing",
        summed.where((F.col("rows") != expected) | (F.col("total") != F.lit(str(sum_expected)).cast("decimal(38,0)"))),
        F.format_string(f"%d rows where {expected} were numbered, or the same number twice", F.col("rows")),
    )


def generation_went_back(journal: Journal) -> DataFrame:
    """Check that a generation is created once, and that its number is greater than that of every earlier generation of
    the group.
    """
    order = Window.partitionBy("group_id").orderBy("seq")
    lives = journal.event.withColumn(
        "life",
        F.sum(F.when(F.col("kind") == "deleted", 1).otherwise(0)).over(order.rowsBetween(Window.unboundedPreceding, 0)),
    )
    per_life = Window.partitionBy("group_id", "life").orderBy("seq").rowsBetween(Window.unboundedPreceding, -1)
    made = lives.where(F.col("kind") == "generation_created").withColumn(
        "greatest", F.max("generation_id").over(per_life)
    )
    return _rows(
        "generation_went_back",
        made.where(F.col("generation_id") <= F.col("greatest")),
        F.format_string("generation %d was made after generation %d", "generation_id", "greatest"),
    )


def state_jumped(journal: Journal) -> DataFrame:
    """Check that each event begins in the state in which the previous one ended, and that states of classic groups
    follow each other legally."""
    order = Window.partitionBy("era", "group_id").orderBy("seq")
    walked = journal.event.where(F.col("group_type") != "").withColumn("earlier", F.lag("state_after").over(order))
    expected = F.when(F.col("earlier") == "Dead", F.lit(None).cast("string")).otherwise(F.col("earlier"))
    torn = expected.isNotNull() & (F.col("state_before") != expected) & (F.col("kind") != "loaded")
    legal = F.lit(False)
    for before, after in CLASSIC_TRANSITIONS.items():
        legal = legal | ((F.col("state_before") == before) & F.col("state_after").isin(*after))
    moved = F.col("state_before").isNotNull() & (F.col("state_before") != F.col("state_after"))
    illegal = (F.col("group_type") == "classic") & moved & ~legal
    return _rows(
        "state_jumped",
        walked.where(torn | illegal),
        F.concat_ws(
            "",
            F.lit("after "),
            F.coalesce("earlier", F.lit("nothing")),
            F.lit(" came "),
            F.col("kind"),
            F.lit(" from "),
            F.coalesce("state_before", F.lit("nothing")),
            F.lit(" to "),
            "state_after",
        ),
    )


def assigned_twice(journal: Journal) -> DataFrame:
    """Check that no partition is assigned to two members in one generation, unless the first released it in between."""
    order = Window.partitionBy("era", "group_id", "topic", "partition", "generation_id").orderBy("seq")
    walked = (
        journal.ownership.withColumn("earlier_change", F.lag("change").over(order))
        .withColumn("earlier_member", F.lag("member_id").over(order))
        .where(F.col("change") == "assigned")
    )
    return _rows(
        "assigned_twice",
        walked.where((F.col("earlier_change") == "assigned") & (F.col("earlier_member") != F.col("member_id"))),
        F.format_string("given to %s and to %s", "earlier_member", "member_id"),
    )


def two_owners(ownership: DataFrame) -> DataFrame:
    """Check that no two members hold a partition at the same time: an interval begins after the previous one has
    ended."""
    # This compares with the greatest end so far, not with the last one, because a short interval may lie within a long
    # one.
    so_far = (
        Window.partitionBy("era", "group_id", "topic", "partition")
        .orderBy("from_seq", "member_id")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    held = (
        ownership.withColumn("from_seq", F.when(F.col("left_censored"), F.lit(0)).otherwise(F.col("from_seq")))
        .where(F.col("from_seq").isNotNull())
        .withColumn("end_seq", F.coalesce("to_seq", F.lit(2**63 - 1)))
        .withColumn("longest", F.max(F.struct("end_seq", "member_id")).over(so_far))
    )
    return _rows(
        "two_owners",
        held.where(F.col("longest.end_seq") > F.col("from_seq")).withColumnsRenamed(
            {"from_seq": "seq", "from_ms": "at_ms"}
        ),
        F.format_string("%s holds it while %s still does", "member_id", "longest.member_id"),
    )


def commit_of_another_generation(journal: Journal, tolerance_ms: int) -> DataFrame:
    """Check that a classic group accepts only commits of its current generation, or commits without a generation while
    it is empty."""
    made = (
        journal.event.where(F.col("kind").isin("generation_created", "loaded") & (F.col("group_type") == "classic"))
        .groupBy("era", "group_id", "generation_id")
        .agg(F.min("seq").alias("made_seq"), F.min("at_ms").alias("made_ms"))
    )
    order = Window.partitionBy("era", "group_id").orderBy("made_seq")
    in_force = made.withColumn("next_seq", F.lead("made_seq").over(order)).withColumn(
        "next_ms", F.lead("made_ms").over(order)
    )
    first_known = in_force.groupBy("era", "group_id").agg(
        F.min("made_seq").alias("known_from"), F.min(F.struct("made_seq", "generation_id")).alias("oldest")
    )
    commits = journal.offset.where(
        (F.col("kind") == "commit") & (F.col("error_code") == 0) & (F.col("generation_id") >= 0)
    ).select("era", "group_id", "topic", "partition", "generation_id", "seq", "at_ms")
    # First check only the first and the last commit of each generation. Check the other commits only if one of these
    # two violates the rule.
    key = ["era", "group_id", "generation_id"]
    used = commits.groupBy(*key).agg(
        F.min("seq").alias("first_seq"), F.max("seq").alias("last_seq"), F.max("at_ms").alias("last_ms")
    )
    known = (
        used.join(in_force, key, "left")
        .join(first_known, ["era", "group_id"])
        .withColumn("unknown", F.col("made_seq").isNull() & (F.col("generation_id") != F.col("oldest.generation_id")))
    )

    def broken(first_seq: str, last_seq: str, last_ms: str) -> tuple[Column, Column, Column]:
        late = (F.col(last_seq) > F.col("next_seq")) & (F.col(last_ms) > F.col("next_ms") + tolerance_ms)
        early = (F.col(first_seq) < F.col("made_seq")) & (F.col("made_seq") > F.col("known_from"))
        never = F.col("unknown") & (F.col(last_seq) > F.col("known_from"))
        return late, early, never

    late, early, never = broken("first_seq", "last_seq", "last_ms")
    suspects = known.where(late | early | never).drop("first_seq", "last_seq", "last_ms", "oldest")
    checked = commits.join(F.broadcast(suspects), key)
    late, early, never = broken("seq", "seq", "at_ms")
    return _rows(
        "commit_of_another_generation",
        checked.where(late | early | never),
        F.when(late, F.format_string("generation %d was accepted though a newer one was in force", "generation_id"))
        .when(early, F.format_string("generation %d was accepted before it was made", "generation_id"))
        .otherwise(F.format_string("generation %d was accepted though it never was in force", "generation_id")),
    )


def told_another_offset(journal: Journal, moves: DataFrame, stretches: DataFrame, tolerance_ms: int) -> DataFrame:
    """Check that OffsetFetch returned the last committed offset, or an offset whose commit was in progress. `stretches`
    lists the partitions in which OffsetFetch returned another offset. Only the offsets of these partitions are read
    again.
    """
    key = ["era", "group_id", "topic", "partition"]
    where = F.broadcast(stretches.where(F.col("told_otherwise") > 0).select(*key).distinct())
    there = replace(journal, offset=journal.offset.join(where, key, "left_semi"))
    suspects = (
        walk(there, moves.join(where, key, "left_semi"))
        .where(told_otherwise())
        .select(*key, "generation_id", "seq", "at_ms", "offset", "committed_before")
    )
    around = there.offset.where((F.col("kind") == "commit") & (F.col("error_code") == 0)).select(
        *key, F.col("at_ms").alias("commit_ms"), "offset"
    )
    excused = (
        around.join(F.broadcast(suspects.select(*key, "seq", "at_ms", "offset")), [*key, "offset"])
        .where(F.abs(F.col("commit_ms") - F.col("at_ms")) <= tolerance_ms)
        .select("seq")
        .distinct()
    )
    return _rows(
        "told_another_offset",
        suspects.join(excused, "seq", "left_anti"),
        F.format_string("a member was told %d where %d was committed", "offset", "committed_before"),
    )


def handoff_not_kept(journal: Journal, ownership: DataFrame) -> DataFrame:
    """Check that a handoff begins once and ends once, and that the target does not receive the partition before the
    handoff has ended."""
    key = ("era", "group_id", "topic", "partition", "generation_id", "source_member_id", "target_member_id")
    waits = journal.handoff.groupBy(*key).agg(
        F.count_if(F.col("phase") == "begun").alias("begun"),
        F.count_if(F.col("phase") == "ended").alias("ended"),
        F.min(F.when(F.col("phase") == "begun", F.col("seq"))).alias("begun_seq"),
        F.min(F.when(F.col("phase") == "ended", F.col("seq"))).alias("ended_seq"),
        F.min("seq").alias("seq"),
        F.min("at_ms").alias("at_ms"),
    )
    doubled = (F.col("begun") > 1) | (F.col("ended") > 1) | (F.col("ended_seq") < F.col("begun_seq"))
    told = ownership.where(F.col("from_seq").isNotNull()).select(
        "era", "group_id", "topic", "partition", F.col("member_id").alias("target_member_id"), "from_seq", "from_ms"
    )
    early = (
        waits.where(F.col("begun_seq").isNotNull())
        .join(told, ["era", "group_id", "topic", "partition", "target_member_id"])
        .where(
            (F.col("from_seq") > F.col("begun_seq")) & (F.col("from_seq") < F.coalesce("ended_seq", F.lit(2**63 - 1)))
        )
    )
    return _rows(
        "handoff_not_kept",
        waits.where(doubled),
        F.format_string("begun %d times, ended %d times", "begun", "ended"),
    ).unionByName(
        _rows(
            "handoff_not_kept",
            early,
            F.format_string("%s was told of it before %s had let go", "target_member_id", "source_member_id"),
        )
    )


def assigned_to_nobody(journal: Journal) -> DataFrame:
    """Check that every partition of a classic generation is assigned to one of its members."""
    members = journal.member.select("era", "group_id", "generation_id", "member_id").distinct()
    complete = (
        journal.event.where((F.col("kind") == "generation_created") & (F.col("group_type") == "classic"))
        .select("era", "group_id", "generation_id")
        .distinct()
    )
    given = journal.ownership.where(F.col("change") == "assigned").join(complete, ["era", "group_id", "generation_id"])
    return _rows(
        "assigned_to_nobody",
        given.join(members, ["era", "group_id", "generation_id", "member_id"], "left_anti"),
        F.format_string("%s is no member of generation %d", "member_id", "generation_id"),
    )


def violations(
    journal: Journal, ownership: DataFrame, moves: DataFrame, stretches: DataFrame, *, tolerance_ms: int = 1_000
) -> DataFrame:
    """Return the rows of all checks in one table."""
    checks: tuple[Callable[[], DataFrame], ...] = (
        lambda: rows_missing(journal),
        lambda: generation_went_back(journal),
        lambda: state_jumped(journal),
        lambda: assigned_twice(journal),
        lambda: assigned_to_nobody(journal),
        lambda: two_owners(ownership),
        lambda: commit_of_another_generation(journal, tolerance_ms),
        lambda: told_another_offset(journal, moves, stretches, tolerance_ms),
        lambda: handoff_not_kept(journal, ownership),
    )
    found = checks[0]()
    for check in checks[1:]:
        found = found.unionByName(check())
    return found
