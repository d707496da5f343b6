"""Tables of either format: create, append exactly once, read, and find the last commit.

The one idea: a location names a table and its format. A path is a Delta table; `iceberg:NAMESPACE.NAME` is a table of
the Iceberg catalog (`catalog.py`). Both formats keep the same promise: an append names its application and a number
that rises, each number is committed once, and the same commit holds the job's progress.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from types import ModuleType

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from pipeline import delta, iceberg
from pipeline.commit import Commit
from pipeline.errors import PipelineError
from pipeline.jvm import classes, file_system
from pipeline.partitioning import Part
from pipeline.schema import ARCHIVE_PARTITIONS
from pipeline.sql import literal

_LOST_FILES = ("spark.sql.files.ignoreMissingFiles", "spark.sql.files.ignoreCorruptFiles")


def location(name: str, kind: str) -> str:
    """Return the location of the table that a user names, in the format `kind`: delta or iceberg."""
    return iceberg.PREFIX + name if kind == "iceberg" and not is_iceberg(name) else name


def is_iceberg(where: str) -> bool:
    return where.startswith(iceberg.PREFIX)


def _format(where: str) -> ModuleType:
    return iceberg if is_iceberg(where) else delta


def exists(spark: SparkSession, where: str) -> bool:
    """Return whether a table exists. Raise PipelineError if its place holds anything else."""
    return _format(where).exists(spark, where)


def create(
    spark: SparkSession, where: str, schema: StructType, partitions: Sequence[Part] = (), order: Sequence[str] = ()
) -> None:
    """Create an empty table if none exists.

    Iceberg writes each file in `order`. In a Delta table `merge_files` clusters rows by it.
    """
    _format(where).create(spark, where, schema, partitions, order)


def drop(spark: SparkSession, where: str) -> None:
    """Delete a table and its files."""
    _format(where).drop(spark, where)


def read(spark: SparkSession, where: str) -> DataFrame:
    """Return the table as it is now; later commits do not change the frame. Raise PipelineError if
    there is no table.
    """
    _require(spark, where)
    return _format(where).read(spark, where)


def _require(spark: SparkSession, where: str) -> None:
    if not exists(spark, where):
        raise PipelineError(
            f"There is no archive at {where}.",
            "Check its name, --format and --catalog, or create one with `sluice-pipeline archive`.",
        )


def schema(spark: SparkSession, where: str) -> StructType:
    """Return the table's columns, including columns that no commit has filled yet."""
    return _format(where).schema(spark, where)


def append(
    frame: DataFrame, where: str, application: str, number: int, metadata: str, *, merge_schema: bool = False
) -> None:
    """Append `frame` unless `application` has committed `number` or a later one."""
    _format(where).append(frame, where, application, number, metadata, merge_schema=merge_schema)


def merge(
    frame: DataFrame, where: str, on: str, clauses: str, application: str, number: int, metadata: str
) -> int | None:
    """Merge `frame` in one commit unless `application` has committed `number` or a later one.

    `on` and `clauses` are SQL of MERGE, with the table as `old` and the frame as `new`. Return the number of changed
    rows, None if the format does not count them.
    """
    return _format(where).merge(frame, where, on, clauses, application, number, metadata)


def replace(frame: DataFrame, where: str, version: int, days: Sequence[tuple[str, date]]) -> None:
    """Replace the days of topics with `frame`, in one commit that fails if another writer changed them since `version`.

    The files of those days are not read. The commit carries no progress.
    """
    spans = " OR ".join(f"(topic = {literal(topic)} AND date = DATE {literal(str(day))})" for topic, day in days)
    _format(where).replace(frame, where, version, spans)


def version(spark: SparkSession, where: str) -> int:
    """Return the version, or the snapshot, that `read` reads now. Raise PipelineError if the table has none."""
    _require(spark, where)
    for commit in commits(spark, where):
        return commit.version
    raise PipelineError(f"{where} holds no archive yet.", "Run `sluice-pipeline archive` first.")


def readable(spark: SparkSession, where: str) -> DataFrame:
    """Return the rows of the remaining files. Read them within `ignoring_lost_files`. For an Iceberg table, the frame
    only has the columns of a record.
    """
    return iceberg.readable(spark, where) if is_iceberg(where) else read(spark, where)


@contextmanager
def ignoring_lost_files(spark: SparkSession) -> Generator[None, None, None]:
    """Let Spark skip missing and damaged files while the context lasts."""
    before = {name: spark.conf.get(name) for name in _LOST_FILES}
    for name in _LOST_FILES:
        spark.conf.set(name, "true")
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value or "false")


def with_files(spark: SparkSession, where: str) -> DataFrame:
    """Return the table as `read` does, with each row's file in the column `_file`. Raise PipelineError if there is no
    table.
    """
    _require(spark, where)
    return _format(where).with_files(spark, where)


def files(spark: SparkSession, where: str) -> DataFrame:
    """Return topic, date and size in bytes of each file of an archive, a row per file."""
    return _format(where).files(spark, where)


def rewrite(
    spark: SparkSession, where: str, condition: str, target_bytes: int, order: Sequence[str]
) -> tuple[int, int]:
    """Merge the files of the partitions that `condition` selects into sorted files of about `target_bytes`.

    Rows and progress do not change. Return the number of removed and of added files.
    """
    return _format(where).rewrite(spark, where, condition, target_bytes, order)


def merge_files(spark: SparkSession, where: str, target_bytes: int, least_files: int) -> tuple[int, int]:
    """Merge the small files of each partition that has at least `least_files` of them, in the table's own sort order.

    Rows and progress do not change. Return the number of removed and of added files.
    """
    return _format(where).merge_files(spark, where, target_bytes, least_files)


def is_archive(spark: SparkSession, where: str) -> bool:
    """Return whether a table is partitioned as `archive` partitions its tables."""
    return tuple(_format(where).partitioned_by(spark, where)) == ARCHIVE_PARTITIONS


def vacuum(spark: SparkSession, where: str, hours: float) -> int:
    """Remove the files that no version of the last `hours` uses. Return about how many: Delta counts to 1,000."""
    return _format(where).vacuum(spark, where, hours)


def holds_file(spark: SparkSession, where: str, file: str) -> bool:
    """Return whether a file in the column `_file` of `with_files` still exists."""
    java = classes(spark)
    # Delta names files by URIs, and Iceberg names them as Hadoop does.
    path = java.org.apache.hadoop.fs.Path(file if is_iceberg(where) else java.java.net.URI(file))
    return bool(file_system(spark, path).exists(path))


def commits(spark: SparkSession, where: str) -> Iterator[Commit]:
    """Yield the commits that the table still records, the latest first."""
    return _format(where).commits(spark, where)
