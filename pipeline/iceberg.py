"""Iceberg tables by name: create, append exactly once, read, and find the last snapshot.

The one idea: Iceberg has no transaction numbers, so an append writes its snapshot to a branch of its own, which readers
do not see, and then moves `main` to that snapshot. Iceberg moves `main` only if its head is an ancestor of the
snapshot, so of two appends that began at the same head the second fails. If another application has moved `main`, the
files are appended again to the new head. A merge begins again if `compact` has moved `main`. The snapshot's summary
contains application, number and progress. So records and progress become visible in one commit of the table.

The branch of the last append is kept: it prevents its snapshot, and with it the progress, from expiring.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, StructField, StructType

from pipeline.commit import Commit
from pipeline.errors import PipelineError
from pipeline.jvm import classes, file_system, java_session
from pipeline.partitioning import Part
from pipeline.schema import RECORD
from pipeline.sql import identifier, literal
from pipeline.widening import wider

PREFIX = "iceberg:"
CATALOG = "sluice"
DEFAULT_NAMESPACE = "default"
_BRANCH = "sluice_"
_APPLICATION, _NUMBER, _PROGRESS = "sluice-application", "sluice-number", "sluice-progress"
FILE = "_file"
_OVERTAKEN = ("is not an ancestor of", "CommitFailedException")
"""Words in an error of Iceberg which say that `main` has moved since an append began."""
_MOVES = 10
"""How often an append tries to move `main`. A try after the first takes no longer than a few queries of metadata."""
_NEWEST = 64
"""Number of snapshots that are read at first. A table may have thousands, and its last commit is among the newest."""

_PROPERTIES = {
    "format-version": "2",
    # A task reads one partition of a topic, so a shuffle by topic and day would be a useless cost.
    "write.distribution-mode": "none",
    "write.parquet.row-group-size-bytes": str(32 * 1024 * 1024),
    # Each commit writes a metadata file that lists all snapshots.
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}


@dataclass(frozen=True, slots=True)
class _Snapshot:
    number: int
    parent: int | None
    operation: str
    summary: dict[str, str]
    committed_ms: int


def parts(where: str) -> tuple[str, str]:
    """Return namespace and name of a location. Raise PipelineError if the location is not a table's name."""
    namespace, separator, name = where.removeprefix(PREFIX).partition(".")
    if not separator:
        namespace, name = DEFAULT_NAMESPACE, namespace
    if not namespace or not name or any(letter in "`/'\\" for letter in namespace + name):
        raise PipelineError(
            f"{where.removeprefix(PREFIX)} is no name of an Iceberg table.", "Write it like events or lake.events."
        )
    return namespace, name


def quoted(where: str) -> str:
    """Return the name in SQL of the table at a location."""
    namespace, name = parts(where)
    return f"{CATALOG}.`{namespace}`.`{name}`"


def exists(spark: SparkSession, where: str) -> bool:
    return spark.catalog.tableExists(quoted(where))


def create(
    spark: SparkSession, where: str, schema: StructType, partitions: Sequence[Part] = (), order: Sequence[str] = ()
) -> None:
    # A job that was killed after the creation leaves an empty table without its order.
    if exists(spark, where) and _head(spark, quoted(where)) is not None:
        return
    namespace, _ = parts(where)
    columns = ", ".join(f"`{field.name}` {_ddl(field.dataType)}" for field in schema.fields)
    fields = [_transform(part) for part in partitions]
    by = f" PARTITIONED BY ({', '.join(fields)})" if fields else ""
    properties = ", ".join(f"'{name}' = '{value}'" for name, value in _PROPERTIES.items())
    spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {CATALOG}.`{namespace}`")
    spark.sql(f"CREATE TABLE IF NOT EXISTS {quoted(where)} ({columns}) USING iceberg{by} TBLPROPERTIES ({properties})")
    if not order and partitions and "offset" in schema.names:
        named = {part.column for part in partitions if not part.unit}
        order = [name for name in ("topic", "partition", "offset") if name not in named]
    if order:
        # Rows of one table partition must follow each other. Otherwise a task would write many files at once.
        whole = ", ".join((*fields, *(f"`{name}`" for name in order)))
        spark.sql(f"ALTER TABLE {quoted(where)} WRITE LOCALLY ORDERED BY {whole}")


def _transform(part: Part) -> str:
    if part.unit == "bucket":
        return f"bucket({part.count}, `{part.column}`)"
    return f"{part.unit}s(`{part.column}`)" if part.unit else f"`{part.column}`"


def drop(spark: SparkSession, where: str) -> None:
    spark.sql(f"DROP TABLE IF EXISTS {quoted(where)} PURGE")


def read(spark: SparkSession, where: str) -> DataFrame:
    head = _head(spark, quoted(where))
    if head is None:
        # Without a version the frame would follow later commits, and a MERGE into the table could not read it.
        return spark.createDataFrame([], schema(spark, where))
    return spark.sql(f"SELECT * FROM {quoted(where)} VERSION AS OF {head}")


def with_files(spark: SparkSession, where: str) -> DataFrame:
    head = _head(spark, quoted(where))
    if head is None:
        return spark.createDataFrame([], schema(spark, where).add(FILE, "string"))
    return spark.sql(f"SELECT *, {FILE} FROM {quoted(where)} VERSION AS OF {head}")


def files(spark: SparkSession, where: str) -> DataFrame:
    """Return the topic, date and size in bytes of each file of the latest snapshot."""
    sizes = f"SELECT partition.topic, partition.date, file_size_in_bytes AS size FROM {quoted(where)}.files"
    return spark.sql(f"{sizes} WHERE content = 0")


def rewrite(
    spark: SparkSession, where: str, condition: str, target_bytes: int, order: Sequence[str]
) -> tuple[int, int]:
    # All files of the day are merged, because the caller has found that some of them are small.
    options = f"map('rewrite-all', 'true', 'target-file-size-bytes', '{target_bytes}')"
    rows = spark.sql(
        f"CALL {CATALOG}.system.rewrite_data_files(table => '{_plain(where)}', strategy => 'sort', "
        f"sort_order => '{', '.join(order)}', where => {literal(condition)}, options => {options})"
    ).collect()
    return rows[0].rewritten_data_files_count, rows[0].added_data_files_count


def merge_files(spark: SparkSession, where: str, target_bytes: int, least_files: int) -> tuple[int, int]:
    held = classes(spark).org.apache.iceberg.spark.Spark3Util.loadIcebergTable(java_session(spark), quoted(where))
    # If a table has no sort order of its own, its files are merged without sorting.
    strategy = "binpack" if held.sortOrder().isUnsorted() else "sort"
    options = f"map('target-file-size-bytes', '{target_bytes}', 'min-input-files', '{least_files}')"
    rows = spark.sql(
        f"CALL {CATALOG}.system.rewrite_data_files(table => '{_plain(where)}', strategy => '{strategy}', "
        f"options => {options})"
    ).collect()
    return rows[0].rewritten_data_files_count, rows[0].added_data_files_count


def partitioned_by(spark: SparkSession, where: str) -> list[str]:
    """Return the names of a table's partition fields."""
    held = classes(spark).org.apache.iceberg.spark.Spark3Util.loadIcebergTable(java_session(spark), quoted(where))
    return [each.name() for each in held.spec().fields()]


def vacuum(spark: SparkSession, where: str, hours: float) -> int:
    java = classes(spark)
    action = java.org.apache.iceberg.spark.actions.SparkActions.get(java_session(spark))
    held = java.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(java_session(spark), quoted(where))
    before_ms = int(time.time() * 1000 - hours * 3_600_000)
    _carry_progress(spark, where, before_ms)
    held.refresh()
    expired = action.expireSnapshots(held).expireOlderThan(before_ms).retainLast(1).execute()
    # The files of crashed appends belong to no snapshot.
    orphans = action.deleteOrphanFiles(held).olderThan(before_ms).usePrefixListing(True).execute()
    return expired.deletedDataFilesCount() + sum(1 for _ in orphans.orphanFileLocations())


def _carry_progress(spark: SparkSession, where: str, before_ms: int) -> None:
    """Commit the last progress again without rows, if its snapshot is from before `before_ms` and is not the newest
    one. Otherwise its branch would keep that snapshot, and with it all files that were merged since. The progress does
    not change, so a concurrent job can continue.
    """
    name = quoted(where)
    head = _head(spark, name)
    last = next((each for each in _history(spark, name, head) if _PROGRESS in each.summary), None)
    if last is None or last.number == head or last.committed_ms >= before_ms:
        return
    held = [each for each, snapshot in _branches(spark, name).items() if snapshot == last.number]
    branch = _begin(spark, name, head)
    application, number, progress = (last.summary[each] for each in (_APPLICATION, _NUMBER, _PROGRESS))
    empty = spark.createDataFrame([], schema(spark, where))
    _append_to(empty, f"{name}.branch_{branch}", application, int(number), progress)
    publish(spark, where, branch, head)
    # A second branch there is of a batch that another job has begun. That job drops the first one after its commit.
    if len(held) == 1:
        spark.sql(f"ALTER TABLE {name} DROP BRANCH IF EXISTS {held[0]}")


def readable(spark: SparkSession, where: str) -> DataFrame:
    """Return the records, without typed columns, in the remaining files. Iceberg's reader cannot skip a file, so Spark
    reads the files themselves. Raise PipelineError if the table has delete files, which Spark would not apply.
    """
    head = _head(spark, quoted(where))
    rows = spark.sql(f"SELECT content, file_path FROM {quoted(where)}.files VERSION AS OF {head}").collect()
    if any(row.content for row in rows):
        raise PipelineError(
            f"{where} has files of deleted rows, so it cannot be read without the file that is missing or damaged.",
            "Restore the file, or roll the table back to an earlier snapshot.",
        )
    path_of = classes(spark).org.apache.hadoop.fs.Path
    paths = [(row.file_path, path_of(row.file_path)) for row in rows]
    there = [text for text, path in paths if file_system(spark, path).exists(path)]
    return spark.read.schema(RECORD).parquet(*there) if there else spark.createDataFrame([], RECORD)


def schema(spark: SparkSession, where: str) -> StructType:
    return spark.table(quoted(where)).schema


def append(
    frame: DataFrame, where: str, application: str, number: int, metadata: str, *, merge_schema: bool = False
) -> None:
    spark, name = frame.sparkSession, quoted(where)
    head = _head_for(spark, where, application, number)
    if head is None:
        return
    if merge_schema:
        _add_columns(spark, name, schema(spark, where), frame.schema)
        for column, kind in wider(schema(spark, where), frame.schema):
            spark.sql(f"ALTER TABLE {name} ALTER COLUMN {column} TYPE {kind.simpleString()}")
    frame = _filled(frame, schema(spark, where))
    branch = _begin(spark, name, head)
    _append_to(frame, f"{name}.branch_{branch}", application, number, metadata)
    for left in reversed(range(_MOVES)):
        try:
            publish(spark, where, branch, head)
            break
        except (PySparkException, Py4JJavaError) as error:
            if not left or not any(each in str(error) for each in _OVERTAKEN):
                raise
            head = _head_for(spark, where, application, number)
            if head is None:
                raise
            branch = _append_again(spark, where, branch, head, _summary(application, number, metadata))
    _drop_branches(spark, name, branch)


def _append_again(spark: SparkSession, where: str, branch: str, head: int, summary: dict[str, str]) -> str:
    """Append the files of the newest snapshot of `branch` to `head`, and return the new branch. Files are not written
    again, so the append does not lose to a job that commits more often than a batch takes.
    """
    name = quoted(where)
    written, moved = _reference(spark, name, branch), _begin(spark, name, head)
    held = classes(spark).org.apache.iceberg.spark.Spark3Util.loadIcebergTable(java_session(spark), name)
    held.refresh()
    again = held.newAppend().toBranch(moved)
    files = held.snapshot(written).addedDataFiles(held.io()).iterator()
    while files.hasNext():
        again.appendFile(files.next())
    # Iceberg marks a picked snapshot like this. Then a tool that expires the first one keeps its files.
    for each, value in {**summary, "source-snapshot-id": str(written)}.items():
        again.set(each, value)
    again.commit()
    return moved


def merge(frame: DataFrame, where: str, on: str, clauses: str, application: str, number: int, metadata: str) -> None:
    spark, name = frame.sparkSession, quoted(where)
    head = _head_for(spark, where, application, number)
    for left in reversed(range(_MOVES)):
        if head is None:
            return
        branch = _begin(spark, name, head)
        _merge_into(frame, where, branch, head, on, clauses, application, number, metadata)
        try:
            publish(spark, where, branch, head)
        except (PySparkException, Py4JJavaError) as error:
            if not left or not any(each in str(error) for each in _OVERTAKEN):
                raise
            now = _head_for(spark, where, application, number)
            # `frame` may hold rows of the table, so it is merged again only if the table has the same rows.
            if now is None or not _has_same_rows(spark, name, head, now):
                raise
            head = now
        else:
            _drop_branches(spark, name, branch)
            return


def _merge_into(
    frame: DataFrame, where: str, branch: str, head: int, on: str, clauses: str, application: str, number: int,
    metadata: str,
) -> None:  # fmt: skip
    spark, name = frame.sparkSession, quoted(where)
    target, properties = f"{name}.branch_{branch}", _properties(application, number, metadata)
    frame.createOrReplaceTempView("sluice_changes")
    for each, value in properties.items():
        spark.conf.set(f"spark.sql.iceberg.{each}", value)
    try:
        spark.sql(f"MERGE INTO {target} AS old USING sluice_changes AS new ON {on} {clauses}").collect()
    finally:
        for each in properties:
            spark.conf.unset(f"spark.sql.iceberg.{each}")
        spark.catalog.dropTempView("sluice_changes")
    if _reference(spark, name, branch) == head:
        # A merge that changes nothing may commit nothing, but the progress must be committed.
        _append_to(spark.createDataFrame([], schema(spark, where)), target, application, number, metadata)


def _has_same_rows(spark: SparkSession, name: str, before: int, now: int) -> bool:
    """Return whether the commits after `before` up to `now` have only merged files."""
    for each in _ancestry(spark, name, now):
        if each.number == before:
            return True
        if each.operation != "replace":
            return False
    return False


def _head_for(spark: SparkSession, where: str, application: str, number: int) -> int | None:
    """Return the snapshot from which a commit begins. Return None if `application` has already committed `number` or a
    later one.
    """
    name = quoted(where)
    head = _head(spark, name)
    if head is None:
        # A table without a snapshot has no head from which a commit could begin.
        spark.createDataFrame([], schema(spark, where)).writeTo(name).append()
        head = _head(spark, name)
    for snapshot in _history(spark, name, head):
        if snapshot.summary.get(_APPLICATION) == application:
            return None if int(snapshot.summary[_NUMBER]) >= number else head
    return head


def _begin(spark: SparkSession, name: str, head: int | None) -> str:
    branch = f"{_BRANCH}{uuid.uuid4().hex}"
    spark.sql(f"ALTER TABLE {name} CREATE BRANCH {branch} AS OF VERSION {head}")
    return branch


def _append_to(frame: DataFrame, target: str, application: str, number: int, metadata: str) -> None:
    writer = frame.writeTo(target)
    for each, value in _properties(application, number, metadata).items():
        writer = writer.option(each, value)
    writer.append()


def _properties(application: str, number: int, metadata: str) -> dict[str, str]:
    """Return a commit's properties, under the option names that write them into the snapshot's summary."""
    return {f"snapshot-property.{each}": value for each, value in _summary(application, number, metadata).items()}


def _summary(application: str, number: int, metadata: str) -> dict[str, str]:
    return {_APPLICATION: application, _NUMBER: str(number), _PROGRESS: metadata}


def replace(frame: DataFrame, where: str, version: int, condition: str) -> None:
    (
        _filled(frame, schema(frame.sparkSession, where))
        .writeTo(quoted(where))
        .option("isolation-level", "serializable")
        .option("validate-from-snapshot-id", str(version))
        .overwrite(F.expr(condition))
    )


def publish(spark: SparkSession, where: str, branch: str, head: int | None) -> None:
    """Move `main` from `head` to the head of `branch`. If `main` has moved, Java raises IllegalArgumentException. Raise
    PipelineError if another job has dropped the branch, because Iceberg would then create it again from the newest
    head.
    """
    name = quoted(where)
    written = next(_ancestry(spark, name, _reference(spark, name, branch)), None)
    if written is None or written.parent != head:
        raise PipelineError(f"Another job writes to {where} and dropped this job's branch.", "Stop one of the two.")
    spark.sql(f"CALL {CATALOG}.system.fast_forward(table => '{_plain(where)}', branch => 'main', to => '{branch}')")


def commits(spark: SparkSession, where: str) -> Iterator[Commit]:
    name = quoted(where)
    for snapshot in _history(spark, name, _head(spark, name)):
        rows = int(snapshot.summary.get("added-records", 0))
        yield Commit(snapshot.number, snapshot.operation, snapshot.summary.get(_PROGRESS), rows)


def _plain(where: str) -> str:
    """Return the name by which Iceberg's procedures know the table at a location."""
    namespace, name = parts(where)
    return f"`{namespace}`.`{name}`"


def _head(spark: SparkSession, name: str) -> int | None:
    """Return the snapshot that readers see. Return None if the table has no snapshot."""
    return _reference(spark, name, "main")


def _reference(spark: SparkSession, name: str, reference: str) -> int | None:
    rows = spark.sql(f"SELECT snapshot_id FROM {name}.refs WHERE name = '{reference}'").collect()
    return rows[0].snapshot_id if rows else None


def _ancestry(spark: SparkSession, name: str, head: int | None) -> Iterator[_Snapshot]:
    """Yield `head` and its ancestors as far as they have not expired."""
    known: dict[int, _Snapshot] = {}
    whole = False
    while head is not None:
        if head not in known and not whole:
            newest = f" ORDER BY committed_at DESC LIMIT {_NEWEST}" if not known else ""
            whole = bool(known)
            columns = "snapshot_id, parent_id, operation, summary, unix_millis(committed_at) AS committed_ms"
            rows = spark.sql(f"SELECT {columns} FROM {name}.snapshots{newest}")
            known |= {
                row.snapshot_id: _Snapshot(
                    row.snapshot_id, row.parent_id, row.operation or "", row.summary or {}, row.committed_ms
                )
                for row in rows.collect()
            }
            continue
        if head not in known:
            return
        yield known[head]
        head = known[head].parent


def _history(spark: SparkSession, name: str, head: int | None) -> Iterator[_Snapshot]:
    """Yield `head` and its ancestors. If an ancestor has expired before one with progress was found, also yield the
    last append, which its branch keeps.
    """
    oldest, told = None, False
    for oldest in _ancestry(spark, name, head):
        told = told or _PROGRESS in oldest.summary
        yield oldest
    if oldest is None or oldest.parent is None or told:
        return
    kept = [next(_ancestry(spark, name, each)) for each in _branches(spark, name).values()]
    # A crashed append left a branch, too. The next append gets its number, so that number is greater than the
    # numbers of all committed ones. A snapshot that is younger than `oldest` is no ancestor of it.
    earlier = [each for each in kept if _PROGRESS in each.summary and each.committed_ms <= oldest.committed_ms]
    yield from sorted(earlier, key=lambda each: int(each.summary[_NUMBER]))[:1]


def _drop_branches(spark: SparkSession, name: str, kept: str) -> None:
    """Drop the branches of earlier appends, including those that crashed before their commit."""
    for each in _branches(spark, name).keys() - {kept}:
        spark.sql(f"ALTER TABLE {name} DROP BRANCH IF EXISTS {each}")


def _branches(spark: SparkSession, name: str) -> dict[str, int]:
    """Return the snapshot of each branch that an append has made."""
    made = f"type = 'BRANCH' AND startswith(name, '{_BRANCH}')"
    rows = spark.sql(f"SELECT name, snapshot_id FROM {name}.refs WHERE {made}").collect()
    return {row.name: row.snapshot_id for row in rows}


def _add_columns(spark: SparkSession, name: str, stored: DataType, wanted: DataType, path: str = "") -> None:
    """Add the columns of `wanted`, nested ones too, that `stored` lacks."""
    if isinstance(stored, ArrayType) and isinstance(wanted, ArrayType):
        _add_columns(spark, name, stored.elementType, wanted.elementType, f"{path}element.")
    if not isinstance(stored, StructType) or not isinstance(wanted, StructType):
        return
    held = {field.name: field.dataType for field in stored.fields}
    for field in wanted.fields:
        here = f"{path}{identifier(field.name)}"
        if field.name in held:
            _add_columns(spark, name, held[field.name], field.dataType, f"{here}.")
        else:
            spark.sql(f"ALTER TABLE {name} ADD COLUMN {here} {_ddl(field.dataType)}")


def _filled(frame: DataFrame, stored: StructType) -> DataFrame:
    """Add to `frame`, as nulls, the table's columns that it lacks, nested ones too. Iceberg refuses an append without
    them.
    """
    held = {field.name: field.dataType for field in frame.schema.fields}
    columns = [
        _cast(F.col(f"`{field.name}`"), held[field.name], field.dataType) if field.name in held else _nothing(field)
        for field in stored.fields
    ]
    return frame.select(
        *(column.alias(field.name) for column, field in zip(columns, stored.fields, strict=True)),
        *(F.col(f"`{name}`") for name in frame.columns if name not in stored.names),
    )


def _cast(column: Column, held: DataType, stored: DataType) -> Column:
    if held.simpleString() == stored.simpleString():
        return column
    if isinstance(held, ArrayType) and isinstance(stored, ArrayType):
        inside, wanted = held.elementType, stored.elementType
        return F.transform(column, lambda element: _cast(element, inside, wanted))
    if isinstance(held, StructType) and isinstance(stored, StructType):
        inner = {field.name: field.dataType for field in held.fields}
        fields = [
            _cast(column[field.name], inner[field.name], field.dataType).alias(field.name)
            if field.name in inner
            else _nothing(field).alias(field.name)
            for field in stored.fields
        ]
        return F.when(column.isNotNull(), F.struct(*fields))
    return column


def _nothing(field: StructField) -> Column:
    return F.lit(None).cast(field.dataType)


def _ddl(kind: DataType) -> str:
    """Return a type in SQL, with every name in backticks."""
    if isinstance(kind, StructType):
        fields = ", ".join(f"{identifier(field.name)}: {_ddl(field.dataType)}" for field in kind.fields)
        return f"struct<{fields}>"
    if isinstance(kind, ArrayType):
        return f"array<{_ddl(kind.elementType)}>"
    return kind.simpleString()
