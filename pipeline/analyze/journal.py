"""The coordinator's journal as DataFrames: its tables declared once, and read from an archive of it.

The one idea: a snapshot of the journal is a range of `seq` (docs/journal.md), and every transform reads one snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from pipeline.errors import PipelineError


def _table(*fields: tuple[str, T.DataType]) -> T.StructType:
    return T.StructType([T.StructField(name, kind) for name, kind in fields])


_TEXT, _INT, _LONG = T.StringType(), T.IntegerType(), T.LongType()

TABLES: Mapping[str, T.StructType] = {
    "journal_event": _table(
        ("seq", _LONG),
        ("at_ms", _LONG),
        ("node_id", _INT),
        ("group_id", _TEXT),
        ("group_type", _TEXT),
        ("kind", _TEXT),
        ("reason", _TEXT),
        ("detail", _TEXT),
        ("generation_id", _INT),
        ("state_before", _TEXT),
        ("state_after", _TEXT),
        ("member_id", _TEXT),
        ("group_instance_id", _TEXT),
        ("client_id", _TEXT),
        ("client_host", _TEXT),
        ("protocol_name", _TEXT),
        ("member_count", _INT),
        ("wait_ms", _LONG),
        ("row_count", _LONG),
    ),
    "journal_member": _table(
        ("seq", _LONG),
        ("at_ms", _LONG),
        ("node_id", _INT),
        ("group_id", _TEXT),
        ("generation_id", _INT),
        ("member_id", _TEXT),
        ("group_instance_id", _TEXT),
        ("client_id", _TEXT),
        ("client_host", _TEXT),
        ("session_timeout_ms", _INT),
        ("rebalance_timeout_ms", _INT),
        ("join_wait_ms", _LONG),
        ("leader", T.BooleanType()),
    ),
    "journal_ownership": _table(
        ("seq", _LONG),
        ("at_ms", _LONG),
        ("node_id", _INT),
        ("group_id", _TEXT),
        ("generation_id", _INT),
        ("topic_id", _TEXT),
        ("topic", _TEXT),
        ("partition", _INT),
        ("change", _TEXT),
        ("member_id", _TEXT),
    ),
    "journal_offset": _table(
        ("seq", _LONG),
        ("at_ms", _LONG),
        ("node_id", _INT),
        ("group_id", _TEXT),
        ("kind", _TEXT),
        ("generation_id", _INT),
        ("member_id", _TEXT),
        ("topic_id", _TEXT),
        ("topic", _TEXT),
        ("partition", _INT),
        ("offset", _LONG),
        ("log_start_offset", _LONG),
        ("log_end_offset", _LONG),
        ("error_code", T.ShortType()),
    ),
    "journal_handoff": _table(
        ("seq", _LONG),
        ("at_ms", _LONG),
        ("node_id", _INT),
        ("group_id", _TEXT),
        ("generation_id", _INT),
        ("topic_id", _TEXT),
        ("topic", _TEXT),
        ("partition", _INT),
        ("phase", _TEXT),
        ("mode", _TEXT),
        ("source_member_id", _TEXT),
        ("target_member_id", _TEXT),
        ("mark_offset", _LONG),
        ("deadline_ms", _LONG),
        ("reason", _TEXT),
        ("wait_ms", _LONG),
    ),
}
"""Columns that the analysis reads, with Postgres' names and in its order. `written_at` is left out, because it only
determines the partition of the table.
"""

DELIVERY = _table(
    ("group_id", _TEXT),
    ("topic", _TEXT),
    ("partition", _INT),
    ("member_id", _TEXT),
    ("at_ms", _LONG),
    ("first_offset", _LONG),
    ("last_offset", _LONG),
)
"""Records that members processed, as a test harness logs them: one row per run of consecutive offsets, in order of
time.
"""

MAX_DROPS = 1_000
"""If a journal has more rows_dropped events than this, its gaps are too many for exact figures."""


@dataclass(frozen=True)
class Journal:
    """One snapshot: rows with first_seq <= seq < next_seq."""

    event: DataFrame
    member: DataFrame
    ownership: DataFrame
    offset: DataFrame
    handoff: DataFrame
    first_seq: int
    next_seq: int
    delivery: DataFrame | None = None

    def map(self, transform: Callable[[DataFrame], DataFrame]) -> Journal:
        """Return the same snapshot with each of its five tables transformed."""
        return replace(
            self,
            event=transform(self.event),
            member=transform(self.member),
            ownership=transform(self.ownership),
            offset=transform(self.offset),
            handoff=transform(self.handoff),
        )

    def between(self, first_seq: int | None, next_seq: int | None) -> Journal:
        """Return the snapshot's rows from `first_seq` up to and without `next_seq`.

        Raise PipelineError if it has none of them.
        """
        first = self.first_seq if first_seq is None else max(first_seq, self.first_seq)
        following = self.next_seq if next_seq is None else min(next_seq, self.next_seq)
        if first >= following:
            raise PipelineError(
                f"The archive has no rows in this range: it holds {self.first_seq:,} to {self.next_seq - 1:,}.",
                "Check --from-seq and --until-seq.",
            )
        inside = (F.col("seq") >= first) & (F.col("seq") < following)
        return replace(self.map(lambda table: table.where(inside)), first_seq=first, next_seq=following)


def with_eras(journal: Journal) -> Journal:
    """Add `era`, the number of times that rows were dropped before this one. No state crosses an era's border."""
    drops = sorted(
        row.seq
        for row in journal.event.where(F.col("kind") == "rows_dropped").select("seq").limit(MAX_DROPS + 1).collect()
    )
    if len(drops) > MAX_DROPS:
        raise PipelineError(
            f"The journal has dropped rows more than {MAX_DROPS} times, so no exact figures can be derived.",
            "Its writer is overloaded, or the database was away. Analyse a later range with --from-seq.",
        )
    if not drops:
        return journal.map(lambda table: table.withColumn("era", F.lit(0)))
    borders = F.array(*(F.lit(seq) for seq in drops))
    return journal.map(
        lambda table: table.withColumn("era", F.size(F.filter(borders, lambda border: border <= F.col("seq"))))
    )


def open_archive(spark: SparkSession, root: str, copied: tuple[int, int] | None = None) -> Journal:
    """Return a journal from folders of Parquet that are named like its tables.

    `copied` is the range of rows in the folders: first_seq and next_seq. Without it, the range follows from the rows.
    """
    tables = {name: spark.read.schema(schema).parquet(f"{root}/{name}") for name, schema in TABLES.items()}
    if copied is None:
        found = [table.agg(F.min("seq"), F.max("seq")).first() for table in tables.values()]
        lows = [row[0] for row in found if row is not None and row[0] is not None]
        highs = [row[1] for row in found if row is not None and row[1] is not None]
        if not lows:
            raise PipelineError(
                f"The archive {root} has no rows.", "Name the folder `journal` of an earlier --out with --archive."
            )
        copied = int(min(lows)), int(max(highs)) + 1
    event, member, ownership, offset, handoff = (tables[name] for name in TABLES)
    return Journal(event, member, ownership, offset, handoff, *copied)
