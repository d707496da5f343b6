"""Delta tables by path: made, appended to exactly once, asked what their last commit said.

The one idea: an append names its application and a number that rises; Delta refuses to write a number twice, so an
append whose outcome is unknown is simply done again. What a job must remember travels in the same commit, as its
metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from pipeline.errors import PipelineError

_RECENT_COMMITS = 20


@dataclass(frozen=True, slots=True)
class Commit:
    version: int
    operation: str
    metadata: str | None
    rows: int


def name(path: str) -> str:
    """A table by its path, as SQL takes it."""
    if "`" in path:
        raise PipelineError(f"The path {path} has a backtick in it.", "Name another folder.")
    return f"delta.`{path}`"


def exists(spark: SparkSession, path: str) -> bool:
    """Whether a Delta table is there. PipelineError if something else is."""
    jvm = spark._jvm
    folder = jvm.org.apache.hadoop.fs.Path(path)
    system = folder.getFileSystem(spark._jsc.hadoopConfiguration())
    if not system.exists(folder):
        return False
    log = jvm.org.apache.hadoop.fs.Path(path, "_delta_log")
    if system.exists(log) and len(system.listStatus(log)):
        return True
    # A folder that a creation left behind when it was killed holds nothing but an empty log.
    if any(each.getPath().getName() != "_delta_log" for each in system.listStatus(folder)):
        raise PipelineError(f"{path} is not empty and not a Delta table.", "Name another folder, or empty this one.")
    return False


def create(spark: SparkSession, path: str, schema: StructType, partitions: Sequence[str] = ()) -> None:
    """Make an empty table unless it is there."""
    if exists(spark, path):
        return
    columns = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in schema.fields)
    by = f" PARTITIONED BY ({', '.join(partitions)})" if partitions else ""
    spark.sql(f"CREATE TABLE IF NOT EXISTS {name(path)} ({columns}) USING DELTA{by}")


def read(spark: SparkSession, path: str) -> DataFrame:
    """PipelineError if there is no table."""
    if not exists(spark, path):
        raise PipelineError(
            f"There is no archive at {path}.", "Check the path, or make one with `sluice-pipeline archive`."
        )
    return spark.read.format("delta").load(path)


def append(
    frame: DataFrame, path: str, application: str, number: int, metadata: str, *, merge_schema: bool = False
) -> None:
    """Append `frame` unless `application` has committed `number` or a later one."""
    (
        frame.write.format("delta")
        .mode("append")
        .option("txnAppId", application)
        .option("txnVersion", number)
        .option("userMetadata", metadata)
        .option("mergeSchema", str(merge_schema).lower())
        .save(path)
    )


def commits(spark: SparkSession, path: str) -> Iterator[Commit]:
    """What the log still tells, the latest first."""
    before: int | None = None
    for limit in (_RECENT_COMMITS, None):
        words = f" LIMIT {limit}" if limit else ""
        rows = spark.sql(f"DESCRIBE HISTORY {name(path)}{words}").select(
            "version", "operation", "userMetadata", "operationMetrics"
        )
        for row in rows.orderBy("version", ascending=False).collect():
            if before is None or row.version < before:
                yield Commit(row.version, row.operation, row.userMetadata, _rows(row.operationMetrics))
                before = row.version


def _rows(metrics: dict[str, Any] | None) -> int:
    return int((metrics or {}).get("numOutputRows", 0))
