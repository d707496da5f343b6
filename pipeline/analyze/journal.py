"""The coordinator's journal as DataFrames: its tables declared once, read from Postgres or from an archive of it.

The one idea: a snapshot of the journal is a range of `seq`. The writer numbers rows in the order of commits, so whoever
has read `next_seq` can read everything below it over any number of connections (docs/journal.md). The range is copied
once to Parquet, and every transform reads that: Postgres is asked for each row one time, however many figures are made.

What it does not do: it holds no rows in the driver, and it knows no schema but the documented one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

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
"""Columns that analysis reads, in Postgres' names and order. `written_at` stays behind: it only finds the partition."""

DELIVERY = _table(
    ("group_id", _TEXT),
    ("topic", _TEXT),
    ("partition", _INT),
    ("member_id", _TEXT),
    ("at_ms", _LONG),
    ("first_offset", _LONG),
    ("last_offset", _LONG),
)
"""What members really processed, as a test harness logs it: one row per contiguous run of offsets, in order of time."""

MAX_DROPS = 1_000
"""rows_dropped events beyond which a journal is too torn to say anything exact about."""

_UUID_COLUMNS = frozenset({"topic_id"})
_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")


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
        """The same snapshot with each of its five tables transformed."""
        return replace(
            self,
            event=transform(self.event),
            member=transform(self.member),
            ownership=transform(self.ownership),
            offset=transform(self.offset),
            handoff=transform(self.handoff),
        )


def with_eras(journal: Journal) -> Journal:
    """Adds `era`: how many times rows were dropped before this one. Nothing is continuous across an era's border."""
    drops = sorted(
        row.seq
        for row in journal.event.where(F.col("kind") == "rows_dropped").select("seq").limit(MAX_DROPS + 1).collect()
    )
    if len(drops) > MAX_DROPS:
        raise PipelineError(
            f"The journal says more than {MAX_DROPS} times that rows were dropped: nothing exact can be said.",
            "Its writer is overloaded, or the database was away. Analyse a later range with --from-seq.",
        )
    if not drops:
        return journal.map(lambda table: table.withColumn("era", F.lit(0)))
    borders = F.array(*(F.lit(seq) for seq in drops))
    return journal.map(
        lambda table: table.withColumn("era", F.size(F.filter(borders, lambda border: border <= F.col("seq"))))
    )


# --- Postgres --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PostgresSource:
    """Where the journal is. `url` is a JDBC URL; user and password travel apart, so that no plan or log shows them."""

    url: str
    properties: Mapping[str, str]
    schema: str = "sluice"
    fetch_size: int = 10_000

    def __post_init__(self) -> None:
        if not _SCHEMA_NAME.fullmatch(self.schema):
            raise PipelineError(
                f"{self.schema!r} cannot be a schema of Sluice.", "Name it with --schema, as in sluice."
            )

    def query(self, spark: SparkSession, sql: str) -> DataFrame:
        return self._reader(spark).option("query", sql).load()

    def bounds(self, spark: SparkSession) -> tuple[int, int]:
        row = self.query(spark, f"select first_seq, next_seq from {self.schema}.journal_position").first()
        if row is None:
            raise PipelineError(
                "The table journal_position is empty.", "Name the schema that Sluice made with --schema."
            )
        return int(row.first_seq), int(row.next_seq)

    def table(self, spark: SparkSession, name: str, first_seq: int, next_seq: int, splits: int) -> DataFrame:
        """Rows of one table within the range, read in `splits` parts of equal width."""
        columns = ", ".join(
            f'"{field.name}"::text as "{field.name}"' if field.name in _UUID_COLUMNS else f'"{field.name}"'
            for field in TABLES[name].fields
        )
        bounded = f"select {columns} from {self.schema}.{name} where seq >= {first_seq} and seq < {next_seq}"
        reader = self._reader(spark).option("dbtable", f"({bounded}) as bounded")
        if splits > 1 and next_seq > first_seq:
            reader = (
                reader.option("partitionColumn", "seq")
                .option("lowerBound", first_seq)
                .option("upperBound", next_seq)
                .option("numPartitions", splits)
            )
        loaded = reader.load()
        return loaded.select(*(F.col(field.name).cast(field.dataType) for field in TABLES[name].fields))

    def _reader(self, spark: SparkSession):  # noqa: ANN202 - pyspark.sql.DataFrameReader
        return (
            spark.read.format("jdbc")
            .options(**self.properties)
            .option("url", self.url)
            .option("driver", "org.postgresql.Driver")
            .option("fetchsize", self.fetch_size)
        )


def copy_snapshot(
    source: PostgresSource,
    spark: SparkSession,
    target: Path,
    *,
    from_seq: int | None = None,
    until_seq: int | None = None,
    rows_per_split: int = 500_000,
    progress: Callable[[str], None],
) -> tuple[int, int]:
    """Copies the range to Parquet below `target`, a directory per table. Returns the range.

    Raises PipelineError if retention dropped rows of the range meanwhile.
    """
    kept_from, known_to = source.bounds(spark)
    first_seq = kept_from if from_seq is None else max(from_seq, kept_from)
    next_seq = known_to if until_seq is None else min(until_seq, known_to)
    if from_seq is not None and from_seq < kept_from:
        progress(f"rows before {kept_from:,} are gone by retention: reading from there, not from {from_seq:,}")
    if first_seq >= next_seq:
        raise PipelineError(
            f"The journal has no rows from {first_seq} to {next_seq - 1}.",
            "A gateway writes them when groups rebalance and commit: let a consumer group run, then try again.",
        )
    splits = max(1, min(256, (next_seq - first_seq) // rows_per_split + 1))
    progress(f"copying rows {first_seq:,} to {next_seq - 1:,} in {splits} parts")
    for name in TABLES:
        source.table(spark, name, first_seq, next_seq, splits).write.mode("overwrite").parquet(str(target / name))
        progress(f"copied {name}")
    still_from, _ = source.bounds(spark)
    if still_from > first_seq:
        raise PipelineError(
            f"Retention dropped rows up to {still_from - 1} while they were read.",
            "Run it again: it will begin behind them. If it happens each time, raise the journal's retention.",
        )
    return first_seq, next_seq


# --- archive -----------------------------------------------------------------------------------------------------------


def open_archive(
    spark: SparkSession, root: str, *, first_seq: int | None = None, next_seq: int | None = None
) -> Journal:
    """A journal as directories of Parquet named like its tables. The range is what the rows say, if it is not given."""
    tables = {name: spark.read.schema(schema).parquet(f"{root}/{name}") for name, schema in TABLES.items()}
    if first_seq is None or next_seq is None:
        found = [table.agg(F.min("seq"), F.max("seq")).first() for table in tables.values()]
        lows = [row[0] for row in found if row is not None and row[0] is not None]
        highs = [row[1] for row in found if row is not None and row[1] is not None]
        if not lows:
            raise PipelineError(
                f"The archive {root} has no rows.", "Archive the journal first, or name another folder."
            )
        first_seq = min(lows) if first_seq is None else first_seq
        next_seq = max(highs) + 1 if next_seq is None else next_seq
    inside = (F.col("seq") >= first_seq) & (F.col("seq") < next_seq)
    bounded = [tables[name].where(inside) for name in TABLES]
    return Journal(*bounded, first_seq=first_seq, next_seq=next_seq)
