"""Delta tables by path: create, append exactly once, read, and find the last commit.

The one idea: an append names its application and a number that rises. Delta refuses to write a number twice, so an
append of unknown outcome is simply repeated. The commit's metadata holds the job's progress.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import takewhile

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, StructType

from pipeline.commit import Commit
from pipeline.errors import PipelineError
from pipeline.jvm import classes, delta_log, file_system, java_session
from pipeline.partitioning import Part
from pipeline.sql import literal
from pipeline.widening import wider

FILE = "_file"
SAFE_HORIZON_HOURS = 168
_CHECK = "spark.databricks.delta.retentionDurationCheck.enabled"
_ORDER = "sluice.sort-by"
"""Property of a table: the columns by which `merge_files` clusters its rows."""
_MERGES = 10
"""How often a merge begins if `compact` merges files of the table each time."""
_MERGED_AT_ONCE = 100
"""Number of partitions whose files one commit merges."""


def name(path: str) -> str:
    """Return the name in SQL of the table at a path. Raise PipelineError if the path has a backtick."""
    if "`" in path:
        raise PipelineError(f"The path {path} contains a backtick.", "Name another folder.")
    return f"delta.`{path}`"


def exists(spark: SparkSession, path: str) -> bool:
    """Return whether a Delta table exists. Raise PipelineError if the path holds anything else."""
    java = classes(spark)
    folder = java.org.apache.hadoop.fs.Path(path)
    system = file_system(spark, folder)
    if not system.exists(folder):
        return False
    log = java.org.apache.hadoop.fs.Path(path, "_delta_log")
    if system.exists(log) and len(system.listStatus(log)):
        return True
    # A job that was killed while it created the table leaves a folder with an empty log.
    if any(each.getPath().getName() != "_delta_log" for each in system.listStatus(folder)):
        raise PipelineError(f"{path} is not empty and not a Delta table.", "Name another folder, or empty this one.")
    return False


def create(
    spark: SparkSession, path: str, schema: StructType, partitions: Sequence[Part] = (), order: Sequence[str] = ()
) -> None:
    """Create an empty table if none exists. Raise PipelineError if Delta cannot partition a table in this way."""
    if exists(spark, path):
        return
    name(path)
    for part in partitions:
        if not part.unit and isinstance(schema[part.column].dataType, BinaryType):
            # Delta keeps the values of partitions as text, in which bytes that are no text are lost.
            raise PipelineError(
                f"A Delta table cannot be partitioned by the column {part.column}, which has bytes.",
                f"Use --partition-by bucket(16,{part.column}).",
            )
    java = classes(spark)
    tables, session = java.io.delta.tables.DeltaTable, java_session(spark)
    # Spark's SQL cannot declare generated columns of a Delta table.
    builder = tables.createIfNotExists(session).location(path)
    for field in schema.fields:
        builder = builder.addColumn(field.name, field.dataType.simpleString())
    for part in partitions:
        if part.unit:
            kind, expression = _derived(part)
            column = tables.columnBuilder(session, _partition(part)).dataType(kind).generatedAlwaysAs(expression)
            builder = builder.addColumn(column.build())
    if partitions:
        names = java.org.apache.spark.api.python.PythonUtils.toSeq([_partition(part) for part in partitions])
        builder = builder.partitionedBy(names)
    if order:
        builder = builder.property(_ORDER, ",".join(order))
    builder.execute()


def _partition(part: Part) -> str:
    """Return the name of the column that a table is partitioned by."""
    return f"{part.column}_{part.unit}" if part.unit else part.column


def _derived(part: Part) -> tuple[str, str]:
    """Return type and expression of a generated column. From a filter on the time, Delta derives filters by day and
    hour.
    """
    column = f"`{part.column}`"
    if part.unit == "day":
        return "date", f"CAST({column} AS DATE)"
    if part.unit == "hour":
        return "string", f"DATE_FORMAT({column}, 'yyyy-MM-dd-HH')"
    return "int", f"PMOD(HASH({column}), {part.count})"


def drop(spark: SparkSession, path: str) -> None:
    folder = classes(spark).org.apache.hadoop.fs.Path(path)
    file_system(spark, folder).delete(folder, True)


def read(spark: SparkSession, path: str) -> DataFrame:
    return spark.read.format("delta").load(path)


def schema(spark: SparkSession, path: str) -> StructType:
    return read(spark, path).schema


def append(
    frame: DataFrame, path: str, application: str, number: int, metadata: str, *, merge_schema: bool = False
) -> None:
    """Append `frame` unless `application` has committed `number` or a later one."""
    if merge_schema:
        _widen(frame.sparkSession, path, schema(frame.sparkSession, path), frame.schema)
    (
        frame.write.format("delta")
        .mode("append")
        .option("txnAppId", application)
        .option("txnVersion", number)
        .option("userMetadata", metadata)
        .option("mergeSchema", str(merge_schema).lower())
        .save(path)
    )


def _widen(spark: SparkSession, path: str, stored: StructType, wanted: StructType) -> None:
    """Widen the columns that are wider in `wanted`. After that, readers must support Delta's feature typeWidening."""
    for number, (column, kind) in enumerate(wider(stored, wanted)):
        if not number:
            spark.sql(f"ALTER TABLE {name(path)} SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')")
        spark.sql(f"ALTER TABLE {name(path)} ALTER COLUMN {column} TYPE {kind.simpleString()}")


def merge(frame: DataFrame, path: str, on: str, clauses: str, application: str, number: int, metadata: str) -> int:
    spark = frame.sparkSession
    left = _MERGES
    while True:
        before = next(commits(spark, path)).version
        try:
            return _merge_into(frame, path, on, clauses, application, number, metadata)
        except (PySparkException, Py4JJavaError) as error:
            left -= 1
            # `frame` may hold rows of the table, so it is merged again only if the table has the same rows.
            if not left or "DELTA_CONCURRENT" not in str(error) or not _has_same_rows(spark, path, before):
                raise


def _has_same_rows(spark: SparkSession, path: str, before: int) -> bool:
    """Return whether the commits after the version `before` have only merged files."""
    since = takewhile(lambda each: each.version > before, commits(spark, path))
    return all(each.operation == "OPTIMIZE" for each in since)


def _merge_into(
    frame: DataFrame, path: str, on: str, clauses: str, application: str, number: int, metadata: str
) -> int:
    spark = frame.sparkSession
    settings = {"commitInfo.userMetadata": metadata, "write.txnAppId": application, "write.txnVersion": str(number)}
    named = {f"spark.databricks.delta.{each}": value for each, value in settings.items()}
    frame.createOrReplaceTempView("sluice_changes")
    for each, value in named.items():
        spark.conf.set(each, value)
    try:
        row = spark.sql(f"MERGE INTO {name(path)} AS old USING sluice_changes AS new ON {on} {clauses}").first()
    finally:
        for each in named:
            spark.conf.unset(each)
        spark.catalog.dropTempView("sluice_changes")
    return 0 if row is None else int(row.num_affected_rows)


def replace(frame: DataFrame, path: str, _version: int, condition: str) -> None:
    # Delta itself checks that no other writer has changed the rows that this commit replaces.
    frame.write.format("delta").mode("overwrite").option("replaceWhere", condition).save(path)


def with_files(spark: SparkSession, path: str) -> DataFrame:
    return read(spark, path).withColumn(FILE, F.col("_metadata.file_path"))


def files(spark: SparkSession, path: str) -> DataFrame:
    """Return the topic, date and size in bytes of each file of the latest version."""
    log = delta_log(spark, path)
    found = DataFrame(log.unsafeVolatileSnapshot().allFiles().toDF(), spark)
    return found.select(*(F.col("partitionValues")[each].alias(each) for each in ("topic", "date")), "size")


def rewrite(spark: SparkSession, path: str, condition: str, target_bytes: int, order: Sequence[str]) -> tuple[int, int]:
    for limit in ("maxFileSize", "minFileSize"):
        spark.conf.set(f"spark.databricks.delta.optimize.{limit}", target_bytes)
    # Delta keeps no statistics of binary columns. Clustering by them still helps, because readers can skip row groups
    # within a file.
    spark.conf.set("spark.databricks.delta.optimize.zorder.checkStatsCollection.enabled", "false")
    where = f" WHERE {condition}" if condition else ""
    by = f" ZORDER BY ({', '.join(f'`{each}`' for each in order)})" if order else ""
    rows = spark.sql(f"OPTIMIZE {name(path)}{where}{by}").collect()
    return rows[0].metrics.numFilesRemoved, rows[0].metrics.numFilesAdded


def merge_files(spark: SparkSession, path: str, target_bytes: int, least_files: int) -> tuple[int, int]:
    snapshot = delta_log(spark, path).unsafeVolatileSnapshot()
    columns = partitioned_by(spark, path)
    own = snapshot.metadata().configuration().get(_ORDER)
    order = [each for each in (own.get().split(",") if own.isDefined() else ()) if each not in columns]
    files = DataFrame(snapshot.allFiles().toDF(), spark).where(F.col("size") < target_bytes // 2)
    values = [F.col("partitionValues")[each].alias(each) for each in columns]
    small = files.groupBy(*values).count().where(F.col("count") >= least_files).collect()
    if not columns:
        return rewrite(spark, path, "", target_bytes, order) if small else (0, 0)
    removed = added = 0
    for start in range(0, len(small), _MERGED_AT_ONCE):
        some = small[start : start + _MERGED_AT_ONCE]
        condition = " OR ".join(f"({' AND '.join(_equals(column, row[column]) for column in columns)})" for row in some)
        one = rewrite(spark, path, condition, target_bytes, order)
        removed, added = removed + one[0], added + one[1]
    return removed, added


def _equals(column: str, value: str | None) -> str:
    return f"`{column}` IS NULL" if value is None else f"`{column}` = {literal(value)}"


def partitioned_by(spark: SparkSession, path: str) -> list[str]:
    """Return the columns that a table is partitioned by."""
    java = classes(spark)
    columns = delta_log(spark, path).unsafeVolatileSnapshot().metadata().partitionColumns()
    return list(java.scala.jdk.javaapi.CollectionConverters.asJava(columns))


def vacuum(spark: SparkSession, path: str, hours: float) -> int:
    before = spark.conf.get(_CHECK)
    spark.conf.set(_CHECK, str(hours >= SAFE_HORIZON_HOURS).lower())
    try:
        doomed = spark.sql(f"VACUUM {name(path)} RETAIN {hours:.6f} HOURS DRY RUN").count()
        spark.sql(f"VACUUM {name(path)} RETAIN {hours:.6f} HOURS").collect()
    finally:
        spark.conf.set(_CHECK, before or "true")
    return doomed


def commits(spark: SparkSession, path: str) -> Iterator[Commit]:
    """Yield the commits that the log still holds, the latest first.

    Each commit is read from its own file, because a query of the table's history would take longer than a small batch.
    """
    java = classes(spark)
    log = delta_log(spark, path)
    nothing = java.scala.Option.empty()
    version = log.update(False, nothing, nothing).version()
    folder = java.org.apache.hadoop.fs.Path(path, "_delta_log")
    system = file_system(spark, folder)
    while version >= 0:
        file = java.org.apache.hadoop.fs.Path(folder, f"{version:020d}.json")
        if not system.exists(file):
            return
        stream = system.open(file)
        try:
            text = java.org.apache.commons.io.IOUtils.toString(stream, "UTF-8")
        finally:
            stream.close()
        yield parse_commit(version, text)
        version -= 1


def parse_commit(version: int, text: str) -> Commit:
    """Return a commit from its file, whose lines are actions. One of them, `commitInfo`, describes the commit."""
    # JSON may contain other line separators, such as U+2028, within a text.
    for line in text.split("\n"):
        if line.startswith('{"commitInfo"'):
            told = json.loads(line)["commitInfo"]
            rows = told.get("operationMetrics", {}).get("numOutputRows", 0)
            return Commit(version, told["operation"], told.get("userMetadata"), int(rows))
    return Commit(version, "", None, 0)
