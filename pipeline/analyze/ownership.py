"""Ownership of each partition over time, its moves, and the least possible number of moves.

Two terms differ. A member *holds* a partition from its assignment until its release. Intervals and idle times are
computed from that. A partition *belongs* to the member to which it was last assigned, even while an eager group has
released everything. Moves are computed from that.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from pipeline.analyze.journal import Journal
from pipeline.analyze.rebalances import numbered_events

GAINS = ("assigned", "kept")


def _numbered(journal: Journal) -> DataFrame:
    """Return the rows of ownership with the number of each row's rebalance."""
    starts = journal.event.where(F.col("kind") == "rebalance_started").select(
        "group_id", "seq", F.lit(1).alias("starts"), *(F.lit(None).alias(name) for name in _OWNERSHIP)
    )
    rows = journal.ownership.select("group_id", "seq", F.lit(0).alias("starts"), *_OWNERSHIP)
    so_far = Window.partitionBy("group_id").orderBy("seq").rowsBetween(Window.unboundedPreceding, 0)
    merged = rows.unionByName(starts).withColumn("rebalance", F.sum("starts").over(so_far).cast("int"))
    return merged.where(F.col("starts") == 0).drop("starts")


_OWNERSHIP = ("era", "at_ms", "generation_id", "topic", "partition", "change", "member_id")


def intervals(journal: Journal) -> DataFrame:
    """Return a row for each interval in which a member held a partition.

    from_ms is null if the member never received the assignment, or if the interval began before the journal or before
    rows were dropped (left_censored). to_ms is null if the interval lasts to the journal's end, or until rows were
    dropped.
    """
    told = (
        journal.event.where((F.col("kind") == "member_synced") & (F.col("group_type") == "classic"))
        .groupBy("group_id", "generation_id", "member_id")
        .agg(F.min("seq").alias("synced_seq"), F.min("at_ms").alias("synced_ms"))
    )
    types = (
        journal.event.where(F.col("group_type") != "").groupBy("group_id").agg(F.max("group_type").alias("group_type"))
    )
    mine = Window.partitionBy("era", "group_id", "topic", "partition", "member_id").orderBy("seq")
    # The order is descending, because a frame that extends to the end of its partition costs Spark the square of the
    # rows.
    later = (
        Window.partitionBy("era", "group_id", "topic", "partition", "member_id")
        .orderBy(F.desc("seq"))
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    released = F.when(F.col("change") == "released", F.struct("seq", "at_ms"))
    walked = (
        _numbered(journal)
        .withColumn("earlier", F.lag("change").over(mine))
        .withColumn("released", F.last(released, ignorenulls=True).over(later))
        .withColumn("released_seq", F.col("released.seq"))
        .withColumn("released_ms", F.col("released.at_ms"))
    )
    opens = F.col("change").isin(*GAINS) & (F.col("earlier").isNull() | (F.col("earlier") == "released"))
    orphan_release = (F.col("change") == "released") & F.col("earlier").isNull()
    opened = (
        walked.where(opens)
        .join(told, ["group_id", "generation_id", "member_id"], "left")
        .join(F.broadcast(types), "group_id", "left")
        .withColumn("at_once", (F.col("change") == "kept") | F.col("group_type").isin("consumer", "streams"))
        .withColumn("told_seq", F.when(F.col("at_once"), F.col("seq")).otherwise(F.col("synced_seq")))
        .withColumn("told_ms", F.when(F.col("at_once"), F.col("at_ms")).otherwise(F.col("synced_ms")))
        .withColumn("in_time", F.col("told_seq") < F.coalesce("released_seq", F.lit(2**63 - 1)))
        .select(
            "era",
            "group_id",
            "topic",
            "partition",
            "member_id",
            "generation_id",
            "rebalance",
            F.col("seq").alias("assigned_seq"),
            F.col("at_ms").alias("assigned_ms"),
            F.when(F.col("in_time"), F.col("told_seq")).alias("from_seq"),
            F.when(F.col("in_time"), F.col("told_ms")).alias("from_ms"),
            F.col("released_seq").alias("to_seq"),
            F.col("released_ms").alias("to_ms"),
            F.lit(False).alias("left_censored"),
        )
    )
    begun_before = walked.where(orphan_release).select(
        "era",
        "group_id",
        "topic",
        "partition",
        "member_id",
        "generation_id",
        "rebalance",
        F.lit(None).cast("long").alias("assigned_seq"),
        F.lit(None).cast("long").alias("assigned_ms"),
        F.lit(None).cast("long").alias("from_seq"),
        F.lit(None).cast("long").alias("from_ms"),
        F.col("seq").alias("to_seq"),
        F.col("at_ms").alias("to_ms"),
        F.lit(True).alias("left_censored"),
    )
    return opened.unionByName(begun_before)


def instances(journal: Journal) -> DataFrame:
    """Return (group_id, member_id, owner): the instance id of a static member, else its member id."""
    named = journal.member.select("group_id", "member_id", "group_instance_id").unionByName(
        journal.event.where(F.col("member_id").isNotNull()).select("group_id", "member_id", "group_instance_id")
    )
    return (
        named.groupBy("group_id", "member_id")
        .agg(F.max("group_instance_id").alias("instance"))
        .select("group_id", "member_id", F.coalesce("instance", "member_id").alias("owner"))
    )


def belongings(journal: Journal) -> DataFrame:
    """Return the rows at which a partition changed the member to which it belongs. The first owner is included, with a
    null source.
    """
    order = Window.partitionBy("era", "group_id", "topic", "partition").orderBy("seq")
    gained = (
        _numbered(journal)
        .where(F.col("change").isin(*GAINS))
        .join(instances(journal), ["group_id", "member_id"], "left")
        .withColumn("owner", F.coalesce("owner", "member_id"))
        .withColumn("source_owner", F.lag("owner").over(order))
        .withColumn("source_member_id", F.lag("member_id").over(order))
    )
    changed = F.col("source_owner").isNull() | (F.col("source_owner") != F.col("owner"))
    return gained.where(changed).select(
        "era",
        "group_id",
        "topic",
        "partition",
        "rebalance",
        "generation_id",
        F.col("seq").alias("move_seq"),
        F.col("at_ms").alias("assigned_ms"),
        "source_member_id",
        F.col("member_id").alias("target_member_id"),
        "source_owner",
        F.col("owner").alias("target_owner"),
    )


def moves(changes: DataFrame) -> DataFrame:
    """Return the rows of `belongings` in which a partition moved from another member."""
    return changes.where(F.col("source_owner").isNotNull())


def presence(journal: Journal) -> DataFrame:
    """Return (group_id, rebalance, owner): the members at the time when the generation of the rebalance was created."""
    gone = F.col("kind").isin("member_left", "member_expired", "member_fenced")
    came = F.col("kind") == "member_joined"
    created = F.col("kind") == "generation_created"
    events = numbered_events(journal.event)
    generations = (
        events.where(created & (F.col("rebalance") > 0))
        .groupBy("group_id", "rebalance")
        .agg(F.min("seq").alias("created_seq"))
    )
    signs = events.where(came | gone).select(
        "group_id", "member_id", "seq", F.when(came, "came").otherwise("gone").alias("mark")
    )
    signs = signs.unionByName(journal.member.select("group_id", "member_id", "seq", F.lit("came").alias("mark")))
    mine = Window.partitionBy("group_id", "member_id").orderBy("seq")
    # A member may return under its id, so it may have several stays.
    turns = (
        signs.withColumn("earlier", F.coalesce(F.lag("mark").over(mine), F.lit("gone")))
        .where("mark <> earlier")
        .withColumn("stay", F.sum(F.when(F.col("mark") == "came", 1).otherwise(0)).over(mine))
        .drop("earlier")
    )
    # A stay, counted in rebalances, is a range of numbers that can be exploded. So no join by inequality is needed.
    ordered = Window.partitionBy("group_id").orderBy("seq")
    marks = (
        generations.select(
            "group_id", F.col("created_seq").alias("seq"), "rebalance", F.lit("generation").alias("mark")
        )
        .unionByName(turns, allowMissingColumns=True)
        .withColumn(
            "last_made",
            F.coalesce(
                F.last("rebalance", ignorenulls=True).over(ordered.rowsBetween(Window.unboundedPreceding, 0)), F.lit(0)
            ),
        )
    )
    last = F.max("rebalance").over(Window.partitionBy("group_id"))
    ranges = (
        marks.withColumn("last_rebalance", last)
        .where(F.col("mark") != "generation")
        .groupBy("group_id", "member_id", "stay")
        .agg(
            F.min(F.when(F.col("mark") == "came", F.col("last_made"))).alias("after"),
            F.max(F.when(F.col("mark") == "gone", F.col("last_made"))).alias("until"),
            F.max("last_rebalance").alias("last_rebalance"),
        )
        .withColumn("until", F.coalesce("until", "last_rebalance"))
        .where(F.col("until") > F.col("after"))
    )
    exploded = ranges.select(
        "group_id", "member_id", F.explode(F.sequence(F.col("after") + 1, F.col("until"))).alias("rebalance")
    )
    return (
        exploded.join(generations.select("group_id", "rebalance"), ["group_id", "rebalance"])
        .join(instances(journal), ["group_id", "member_id"], "left")
        .select("group_id", "rebalance", F.coalesce("owner", "member_id").alias("owner"))
        .distinct()
    )


def minimum_moves(journal: Journal, changes: DataFrame) -> DataFrame:
    """Return (group_id, rebalance, partitions_moved, minimum_moves) for each rebalance that created a generation.

    `changes` are the journal's belongings.

    The minimum is the number of partitions that an assignor must move if it keeps as many as it can and shares differ
    by at most one. It assumes that every member reads every topic. If subscriptions differ, it is a lower bound.
    """
    deltas = (
        changes.select("group_id", "rebalance", F.col("target_owner").alias("owner"), F.lit(1).alias("delta"))
        .unionByName(
            changes.where(F.col("source_owner").isNotNull()).select(
                "group_id", "rebalance", F.col("source_owner").alias("owner"), F.lit(-1).alias("delta")
            )
        )
        .groupBy("group_id", "rebalance", "owner")
        .agg(F.sum("delta").alias("delta"))
    )
    present = presence(journal).withColumn("present", F.lit(1))
    before = Window.partitionBy("group_id", "owner").orderBy("rebalance").rangeBetween(Window.unboundedPreceding, -1)
    had = (
        deltas.join(present, ["group_id", "rebalance", "owner"], "full")
        .withColumn("had", F.coalesce(F.sum("delta").over(before), F.lit(0)))
        .where(F.col("present") == 1)
    )
    new = changes.groupBy("group_id", "rebalance").agg(
        F.sum(F.when(F.col("source_owner").isNull(), 1).otherwise(0)).alias("first_owned"),
        F.sum(F.when(F.col("source_owner").isNotNull(), 1).otherwise(0)).alias("partitions_moved"),
    )
    made = present.groupBy("group_id", "rebalance").agg(F.count("*").alias("members"))
    so_far = Window.partitionBy("group_id").orderBy("rebalance")
    totals = (
        made.join(new, ["group_id", "rebalance"], "full")
        .fillna(0, ["first_owned", "partitions_moved"])
        .withColumn("partitions", F.sum("first_owned").over(so_far.rowsBetween(Window.unboundedPreceding, 0)))
        .withColumn("owned_before", F.col("partitions") - F.col("first_owned"))
        .where(F.col("members").isNotNull())
        .withColumn("quota", F.expr("partitions div members"))
        .withColumn("spare", F.expr("partitions % members"))
    )
    kept = (
        had.join(totals, ["group_id", "rebalance"])
        .groupBy("group_id", "rebalance")
        .agg(
            F.sum(F.least("had", "quota")).alias("within_quota"),
            F.sum(F.when(F.col("had") > F.col("quota"), 1).otherwise(0)).alias("above_quota"),
        )
    )
    return totals.join(kept, ["group_id", "rebalance"]).select(
        "group_id",
        "rebalance",
        "partitions_moved",
        F.greatest(F.lit(0), F.col("owned_before") - F.col("within_quota") - F.least("spare", "above_quota")).alias(
            "minimum_moves"
        ),
    )


def idle(ownership: DataFrame, rebalances: DataFrame) -> DataFrame:
    """Return (group_id, rebalance, unowned_partition_ms): for how long partitions had no owner, summed up. The time is
    attributed to the rebalance that gave the partition its next owner. It begins at the release, or at the start of
    that series of rebalances if that is later, because no member waits in an empty group.
    """
    order = Window.partitionBy("era", "group_id", "topic", "partition").orderBy("from_seq")
    held = (
        ownership.where(F.col("from_ms").isNotNull() | F.col("left_censored"))
        .withColumn("from_seq", F.coalesce("from_seq", F.lit(0)))
        .withColumn("let_go_ms", F.lag("to_ms").over(order))
        .where(F.col("let_go_ms").isNotNull() & F.col("from_ms").isNotNull())
    )
    chains = rebalances.select("group_id", "rebalance", "chain_started_ms")
    waited = F.col("from_ms") - F.greatest("let_go_ms", "chain_started_ms")
    return (
        held.join(chains, ["group_id", "rebalance"])
        .groupBy("group_id", "rebalance")
        .agg(F.sum(F.greatest(F.lit(0), waited)).alias("unowned_partition_ms"))
    )


def with_moves(rebalances: DataFrame, journal: Journal, changes: DataFrame, ownership: DataFrame) -> DataFrame:
    """Return rebalances with partitions_moved, minimum_moves, stickiness (1 if no move was unnecessary) and
    unowned_partition_ms.
    """
    key = ["group_id", "rebalance"]
    return (
        rebalances.join(minimum_moves(journal, changes), key, "left")
        .join(idle(ownership, rebalances), key, "left")
        .withColumn(
            "stickiness",
            F.when(F.col("partitions_moved") > 0, F.col("minimum_moves") / F.col("partitions_moved")).when(
                F.col("partitions_moved") == 0, F.lit(1.0)
            ),
        )
        .withColumn("unowned_partition_ms", F.coalesce("unowned_partition_ms", F.lit(0)))
    )
