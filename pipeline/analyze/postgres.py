"""A snapshot of the journal, copied from Postgres to Parquet.

The one idea: the writer numbers rows in the order of commits. So a reader that knows `next_seq` can read all rows below
it over any number of connections (docs/journal.md). Each row is read once, however many figures use it.

There are two ways to read. Over TCP Spark reads by JDBC, in parts of equal width, so a cluster can share the work. JDBC
cannot use a Unix socket, where the gateway's embedded Postgres listens; there asyncpg streams a COPY.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import asyncpg  # pyright: ignore[reportMissingTypeStubs]
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema  # pyright: ignore[reportUnknownVariableType]

from pipeline import jdbc
from pipeline.analyze.journal import TABLES
from pipeline.errors import PipelineError

_UUID_COLUMNS = frozenset({"topic_id"})
_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
T = TypeVar("T")


def _selection(schema: str, table: str, first_seq: int, next_seq: int) -> str:
    columns = ", ".join(
        f'"{field.name}"::text as "{field.name}"' if field.name in _UUID_COLUMNS else f'"{field.name}"'
        for field in TABLES[table].fields
    )
    return f"select {columns} from {schema}.{table} where seq >= {first_seq} and seq < {next_seq}"


def _bounds_query(schema: str) -> str:
    return f"select first_seq, next_seq from {schema}.journal_position"


class Source(ABC):
    """The location of the journal."""

    @abstractmethod
    def bounds(self) -> tuple[int, int]:
        """Return first_seq and next_seq, as they are now."""

    @abstractmethod
    def copy(self, table: str, first_seq: int, next_seq: int, target: Path) -> None:
        """Write the rows of one table as Parquet into a folder of its own."""


@dataclass(frozen=True)
class JdbcSource(Source):
    """Postgres over TCP. User and password are not in the URL, so that no Spark plan shows them."""

    spark: SparkSession
    url: str
    properties: Mapping[str, str]
    schema: str = "sluice"
    fetch_size: int = 10_000
    rows_per_split: int = 500_000

    def bounds(self) -> tuple[int, int]:
        row = self._load({"query": _bounds_query(self.schema)}).first()
        if row is None:
            raise PipelineError(
                "The table journal_position is empty.", "Name the schema that Sluice made with --schema."
            )
        return int(row.first_seq), int(row.next_seq)

    def copy(self, table: str, first_seq: int, next_seq: int, target: Path) -> None:
        options: dict[str, str] = {"dbtable": f"({_selection(self.schema, table, first_seq, next_seq)}) as bounded"}
        splits = max(1, min(256, (next_seq - first_seq) // self.rows_per_split + 1))
        if splits > 1:
            options |= {
                "partitionColumn": "seq",
                "lowerBound": str(first_seq),
                "upperBound": str(next_seq),
                "numPartitions": str(splits),
            }
        rows = self._load(options)
        typed = rows.select(*(F.col(field.name).cast(field.dataType) for field in TABLES[table].fields))
        typed.write.mode("overwrite").parquet(str(target))

    def _load(self, options: Mapping[str, str]) -> DataFrame:
        reader = self.spark.read.format("jdbc").options(**{**self.properties, **options})
        return reader.options(url=self.url, driver="org.postgresql.Driver", fetchsize=str(self.fetch_size)).load()


@dataclass(frozen=True)
class SocketSource(Source):
    """Postgres behind a Unix socket of this machine."""

    url: str
    schema: str = "sluice"
    row_group: int = 250_000

    def bounds(self) -> tuple[int, int]:
        async def ask(connection: Any) -> tuple[int, int]:
            row = await connection.fetchrow(_bounds_query(self.schema))
            assert row is not None
            return int(row["first_seq"]), int(row["next_seq"])

        return asyncio.run(self._with_connection(ask))

    def copy(self, table: str, first_seq: int, next_seq: int, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        for old in target.iterdir():
            old.unlink()
        schema: pa.Schema = to_arrow_schema(TABLES[table])
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            copied = Path(scratch) / "rows.csv"

            async def stream(connection: Any) -> None:
                query = _selection(self.schema, table, first_seq, next_seq)
                await connection.copy_from_query(query, output=str(copied), format="csv")

            asyncio.run(self._with_connection(stream))
            if copied.stat().st_size == 0:
                parquet.write_table(schema.empty_table(), target / "part-0.parquet")
                return
            self._to_parquet(copied, schema, target / "part-0.parquet")

    def _to_parquet(self, copied: Path, schema: pa.Schema, target: Path) -> None:
        reader = csv.open_csv(
            copied,
            read_options=csv.ReadOptions(column_names=schema.names, block_size=16 << 20),
            parse_options=csv.ParseOptions(newlines_in_values=True),
            # COPY writes null as an empty field, and an empty string as "".
            convert_options=csv.ConvertOptions(
                column_types=schema,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                true_values=["t"],
                false_values=["f"],
            ),
        )
        with parquet.ParquetWriter(target, schema, compression="zstd") as writer:
            for batch in reader:
                writer.write_batch(batch, row_group_size=self.row_group)

    async def _with_connection(self, use: Callable[[Any], Awaitable[T]]) -> T:
        try:
            connection = cast(Any, await asyncpg.connect(self.url, timeout=jdbc.CONNECT_SECONDS))
        except (OSError, asyncpg.PostgresError, TimeoutError) as error:
            raise PipelineError(
                f"Postgres does not answer ({type(error).__name__}: {error}).",
                "Check --database-url. An embedded Postgres runs only while its gateway does.",
            ) from error
        try:
            return await use(connection)
        except asyncpg.UndefinedTableError as error:
            raise PipelineError(
                f"There is no journal in this database ({error}).", "Check --database-url and --schema."
            ) from error
        finally:
            await connection.close()


def source_of(spark: SparkSession, url: str, schema: str, *, rows_per_split: int = 500_000) -> Source:
    """Return the source for a `postgresql://` URL."""
    if not _SCHEMA_NAME.fullmatch(schema):
        raise PipelineError(f"{schema!r} cannot be a schema of Sluice.", "Name it with --schema, as in sluice.")
    found = jdbc.address(url, "--database-url")
    if found is None:
        return SocketSource(url, schema)
    address, properties = found
    # Let the server send numbers in binary form from the first row on. By default it does so only after a statement has
    # run five times.
    properties["prepareThreshold"] = "-1"
    return JdbcSource(spark, address, properties, schema, rows_per_split=rows_per_split)


def copy_snapshot(
    source: Source,
    target: Path,
    progress: Callable[[str], None],
    *,
    from_seq: int | None = None,
    until_seq: int | None = None,
) -> tuple[int, int]:
    """Copy a range of the journal to a folder per table. Return the range.

    Raise PipelineError if the range is empty, or if retention dropped some of its rows in the meantime.
    """
    kept_from, known_to = source.bounds()
    first_seq = kept_from if from_seq is None else max(from_seq, kept_from)
    next_seq = known_to if until_seq is None else min(until_seq, known_to)
    if from_seq is not None and from_seq < kept_from:
        progress(f"rows before {kept_from:,} are gone by retention: reading from there, not from {from_seq:,}")
    if first_seq >= next_seq:
        raise PipelineError(
            "The journal has no rows in this range.",
            "A gateway writes them when groups rebalance and commit: let a consumer group run, then try again.",
        )
    progress(f"copying rows {first_seq:,} to {next_seq - 1:,}")
    for name in TABLES:
        source.copy(name, first_seq, next_seq, target / name)
        progress(f"copied {name}")
    still_from, _ = source.bounds()
    if still_from > first_seq:
        raise PipelineError(
            f"Retention dropped rows up to {still_from - 1:,} while they were read.",
            "Run the job again: it begins behind them. If this happens each time, raise the journal's retention.",
        )
    return first_seq, next_seq
