"""The journal is read from Postgres without changes: in several parts over TCP by JDBC, or through a Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import asyncpg
import pytest
from pyspark.sql import SparkSession

from pipeline.analyze.invariants import rows_missing
from pipeline.analyze.journal import TABLES, open_archive
from pipeline.analyze.postgres import JdbcSource, SocketSource, Source, copy_snapshot, source_of
from pipeline.errors import PipelineError, explain
from storage.pool import SESSION_SETTINGS
from tests.pipeline.planted import Row, journal
from tests.pipeline.relay import relayed

pytestmark = pytest.mark.usefixtures("interpreted")

SEED = 3


def _store(url: str, tables: dict[str, list[Row]]) -> None:
    """Write the rows as the journal's writer does: reserve numbers and insert the rows in one transaction."""

    async def write() -> None:
        connection = await asyncpg.connect(url, server_settings={**SESSION_SETTINGS})
        try:
            await connection.execute("select journal_make_partitions(1)")
            count = sum(len(tables[name]) for name in TABLES)
            async with connection.transaction():
                assert await connection.fetchval("select journal_reserve($1)", count) == 1
                for name, schema in TABLES.items():
                    rows = [tuple(row.get(column) for column in schema.names) for row in tables[name]]
                    await connection.copy_records_to_table(name, records=rows, columns=schema.names)
        finally:
            await connection.close()

    asyncio.run(write())


@pytest.fixture
def relay(database_url: str) -> Iterator[str]:
    with relayed(database_url) as url:
        yield url


@pytest.fixture
def rows() -> dict[str, list[Row]]:
    tables, _ = journal(SEED, groups=2)
    event = tables["journal_event"][3]
    event["detail"] = 'a "quoted", text\nof two lines'
    event["reason"] = ""
    return tables


@pytest.mark.parametrize("over", ["tcp", "socket"])
def test_what_is_copied_is_what_was_written(
    spark: SparkSession, database_url: str, relay: str, rows: dict[str, list[Row]], tmp_path: Path, over: str
) -> None:
    _store(database_url, rows)
    source: Source = source_of(spark, relay if over == "tcp" else database_url, "sluice", rows_per_split=300)
    assert isinstance(source, JdbcSource if over == "tcp" else SocketSource)
    count = sum(len(rows[name]) for name in TABLES)
    assert copy_snapshot(source, tmp_path, lambda line: None) == (1, count + 1)
    copied = open_archive(spark, str(tmp_path))
    for name, schema in TABLES.items():
        table = getattr(copied, name.removeprefix("journal_"))
        found = {tuple(row) for row in table.collect()}
        assert found == {tuple(row.get(column) for column in schema.names) for row in rows[name]}


def test_a_range_and_what_retention_took(
    spark: SparkSession, database_url: str, rows: dict[str, list[Row]], tmp_path: Path
) -> None:
    _store(database_url, rows)
    source = source_of(spark, database_url, "sluice")
    said: list[str] = []
    asyncio.run(_execute(database_url, "update sluice.journal_position set first_seq = 100"))
    assert copy_snapshot(source, tmp_path, said.append, from_seq=50, until_seq=200) == (100, 200)
    assert "rows before 100 are gone by retention" in said[0]
    numbers = {row.seq for row in open_archive(spark, str(tmp_path)).offset.collect()}
    assert numbers
    assert min(numbers) >= 100
    assert max(numbers) < 200


def test_a_range_of_an_archive_ends_where_the_archive_does(
    spark: SparkSession, database_url: str, rows: dict[str, list[Row]], tmp_path: Path
) -> None:
    _store(database_url, rows)
    copied = copy_snapshot(source_of(spark, database_url, "sluice"), tmp_path, lambda line: None, from_seq=100)
    whole = open_archive(spark, str(tmp_path))
    assert (whole.first_seq, whole.next_seq) == copied
    assert rows_missing(whole.between(1, 10**9)).collect() == []
    part = whole.between(150, 200)
    assert (part.first_seq, part.next_seq) == (150, 200)
    assert rows_missing(part).collect() == []
    with pytest.raises(PipelineError, match="no rows in this range: it holds 100 to"):
        whole.between(None, 100)


def test_retention_that_passes_the_reader_is_told(
    spark: SparkSession, database_url: str, rows: dict[str, list[Row]], tmp_path: Path
) -> None:
    _store(database_url, rows)
    source = source_of(spark, database_url, "sluice")

    def pass_by(line: str) -> None:
        if line == "copied journal_event":
            asyncio.run(_execute(database_url, "update sluice.journal_position set first_seq = 500"))

    with pytest.raises(PipelineError, match="Retention dropped rows up to 499"):
        copy_snapshot(source, tmp_path, pass_by)


def test_an_empty_journal_is_told(spark: SparkSession, database_url: str, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="no rows"):
        copy_snapshot(source_of(spark, database_url, "sluice"), tmp_path, lambda line: None)


def test_a_database_without_a_journal_is_told(spark: SparkSession, empty_database_url: str, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="There is no journal in this database"):
        copy_snapshot(source_of(spark, empty_database_url, "sluice"), tmp_path, lambda line: None)


def test_a_database_without_a_journal_is_told_over_tcp_as_well(
    spark: SparkSession, empty_database_url: str, tmp_path: Path
) -> None:
    with relayed(empty_database_url) as url, pytest.raises(Exception, match="does not exist") as failed:
        copy_snapshot(source_of(spark, url, "sluice"), tmp_path, lambda line: None)
    told = explain(failed.value)
    assert told.cause.startswith("There is no journal in this database. (")
    assert "--schema" in told.next_step


def test_a_postgres_that_goes_while_it_is_read_is_told(
    spark: SparkSession, database_url: str, rows: dict[str, list[Row]], tmp_path: Path
) -> None:
    _store(database_url, rows)
    with ExitStack() as stack:
        source = source_of(spark, stack.enter_context(relayed(database_url)), "sluice")

        def lose(line: str) -> None:
            if line == "copied journal_event":
                stack.close()

        with pytest.raises(Exception, match="connect") as failed:
            copy_snapshot(source, tmp_path, lose)
    told = explain(failed.value)
    assert told.cause.startswith("Postgres does not answer. (")
    assert "--database-url" in told.next_step
    assert "\tat " not in told.cause


@pytest.mark.parametrize(
    ("url", "schema", "says"),
    [("mysql://host/db", "sluice", "postgresql://"), ("postgresql://host/db", "sluice; drop", "cannot be a schema")],
)
def test_what_cannot_be_an_address(spark: SparkSession, url: str, schema: str, says: str) -> None:
    with pytest.raises(PipelineError, match=says):
        source_of(spark, url, schema)


def test_a_password_is_in_no_url(spark: SparkSession) -> None:
    source = source_of(spark, "postgresql://me:s%40cret@db:6432/prod?sslmode=require", "sluice")
    assert isinstance(source, JdbcSource)
    assert source.url == "jdbc:postgresql://db:6432/prod"
    assert source.properties["password"] == "s@cret"
    assert source.properties["sslmode"] == "require"


async def _execute(url: str, sql: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()
