"""The drill of docs/restore.md: topics, offsets and a user's own tables are restored to one moment."""

from __future__ import annotations

import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from confluent_kafka import Consumer

from storage.embedded import EmbeddedPostgres
from storage.embedded_socket import USER
from storage.postgres_programs import bin_directory
from tests.closing import close
from tests.gateway_process import GatewayFactory
from tests.objects.conftest import s3, url
from tests.objects.records import moved
from tests.objects.s3_server import S3Server
from tests.postgres import EMPTY, Databases, LoopThread, cluster_directory
from tests.sql.conftest import create_topic
from tests.sql.offsets import COMMIT, fence
from tests.sql.reading import read
from tests.steps.command import output_of, sluice
from tests.steps.waiting import until

__all__ = ["s3", "url"]

Connection = asyncpg.Connection
GROUP = "billing"
DEADLINE_S = 60
IN_STORE = {"log.store.roll.ms": "100", "log.retention.check.interval.ms": "500"}
"""Settings of a node that moves records out of Postgres at once."""


class Place:
    """A place where records are stored. Nodes and commands need the variables in `environment` to reach a bucket."""

    def __init__(self, kind: str, location: str, environment: Mapping[str, str]) -> None:
        self.settings = {} if kind == "postgres" else IN_STORE
        self.location = location
        self.environment = {**environment, "SLUICE_LOG_STORE": location}
        self._has_files = kind != "postgres"

    async def settled(self, database_url: str) -> None:
        """Wait until all records are in the given place."""
        if self._has_files:
            await moved(database_url)


@pytest.fixture(
    params=[
        pytest.param("postgres", marks=pytest.mark.long),
        "segments",
        pytest.param("bucket", marks=pytest.mark.long),
    ]
)
def place(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> Place:
    """Each place where records may be stored. Without Go the bucket is skipped."""
    kind: str = request.param
    if kind == "bucket":
        server: S3Server = request.getfixturevalue("s3")
        return Place(kind, url, server.environment())
    return Place(kind, str(tmp_path / "log"), {})


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    """An event loop for the servers, which live longer than the test's own event loop."""
    made = LoopThread()
    yield made
    made.close()


@pytest.fixture
async def directory() -> AsyncIterator[Path]:
    with cluster_directory() as made:
        yield made


async def order(sql: Connection, first: int, count: int) -> None:
    """Insert orders and produce their events. Each order has a transaction of its own."""
    for number in range(first, first + count):
        async with sql.transaction():
            await sql.execute("insert into orders values ($1)", number)
            await sql.execute("select kafka.produce('orders', $1, partition => 0)", str(number))


async def bill(sql: Connection, bootstrap: str, until: int) -> list[int]:
    """Store the records that a stock consumer of the group reads, with its position, up to order `until`. Return these
    records.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": GROUP,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe(["orders"])
    found: list[int] = []
    deadline_s = time.monotonic() + DEADLINE_S
    try:
        while until not in found:
            assert time.monotonic() < deadline_s, found
            message: Any = consumer.poll(0.1)
            if message is None:
                continue
            assert message.error() is None, message.error()
            number = int(message.value())
            found.append(number)
            member = consumer.memberid()
            assert member
            async with sql.transaction():
                await sql.execute("insert into billed values ($1)", number)
                generation = await fence(sql, GROUP, member)
                await sql.execute(COMMIT, GROUP, "orders", 0, message.offset() + 1, generation, member)
        return found
    finally:
        close(consumer)


async def prepare(sql: Connection) -> None:
    await sql.execute("create table orders (id integer primary key); create table billed (id integer primary key)")


async def assert_restored(sql: Connection, bootstrap: str, orders: int, billed: int) -> None:
    """Assert that tables, topic and position are of one moment, and that clients can continue from there."""
    assert await sql.fetchval("select count(*) from orders") == orders
    assert await sql.fetchval("select count(*) from billed") == billed
    assert await sql.fetchval('select "offset" from kafka.committed($1)', GROUP) == billed
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader", "enable.auto.commit": False})
    try:
        log = [int(message.value()) for message in read(reader, "orders", orders, partitions=1, none_more_s=0.5)]
    finally:
        reader.close()
    assert log == list(range(orders))
    await order(sql, orders, 5)
    assert await bill(sql, bootstrap, orders + 4) == list(range(billed, orders + 5))
    rows = await sql.fetch("select id from billed order by id")
    assert [row["id"] for row in rows] == list(range(orders + 5))


@pytest.mark.timeout(180)
async def test_a_recovery_to_a_point_in_time_restores_tables_topics_and_offsets(
    gateway_factory: GatewayFactory, loop: LoopThread, directory: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, copy = directory / "archive", directory / "restored"
    archive.mkdir(mode=0o777)
    archive.chmod(0o777)
    settings = {"archive_mode": "on", "archive_command": f"cp %p {archive}/%f", "wal_level": "replica"}
    server = EmbeddedPostgres(directory / "original", settings=settings)
    gateway = gateway_factory(place.settings, database_url=loop.run(server.start()), environment=place.environment)
    create_topic(gateway, "orders", 1)
    sql = await asyncpg.connect(server.url)
    await prepare(sql)
    await order(sql, 0, 30)
    copy.mkdir(mode=0o711)
    socket = ("-h", str(directory / "original" / "socket"), "-U", USER)
    words = [bin_directory() / "pg_basebackup", *socket, "-D", copy / "postgres", "-c", "fast"]
    subprocess.run(words, check=True, timeout=DEADLINE_S)
    await bill(sql, gateway.bootstrap, 29)
    await place.settled(server.url)
    gateway.kill()
    await order(sql, 30, 20)  # before that moment no node gives these records offsets
    await sql.execute("select pg_create_restore_point('drill')")
    gateway.restart()
    await order(sql, 50, 30)
    await bill(sql, gateway.bootstrap, 79)
    # these records are later than that moment, so the restored index does not know them
    await place.settled(server.url)
    last: Any = await sql.fetchval("select pg_walfile_name(pg_switch_wal())")
    await until((archive / last).exists, "Postgres archives its WAL")
    await sql.close()
    gateway.stop()
    loop.run(server.stop())

    (copy / "postgres" / "recovery.signal").touch()
    recovery = {
        "restore_command": f"cp {archive}/%f %p",
        "recovery_target_name": "drill",
        "recovery_target_action": "promote",
    }
    restored = EmbeddedPostgres(copy, settings=recovery)
    url = loop.run(restored.start())
    sql = await asyncpg.connect(url)
    await until(lambda: sql.fetchval("select not pg_is_in_recovery()"), "Postgres reaches the restore point")
    try:
        for name, value in place.environment.items():
            monkeypatch.setenv(name, value)
        new = gateway_factory(place.settings, database_url=url, environment=place.environment)
        await assert_restored(sql, new.bootstrap, 50, 30)
        await place.settled(url)
        new.stop()
        # Files that were written after that moment are unknown to the restored index. New files must not replace them.
        assert "are right" in output_of("check", "--repair", "--database-url", url, "--log-store", place.location)
    finally:
        await sql.close()
        loop.run(restored.stop())


@pytest.mark.timeout(180)
async def test_a_backup_and_a_dump_without_writers_restore_tables_topics_and_offsets(
    gateway_factory: GatewayFactory,
    postgres: Databases,
    tmp_path: Path,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    gateway = gateway_factory(place.settings, environment=place.environment)
    assert gateway.database_url is not None
    create_topic(gateway, "orders", 1)
    sql = await asyncpg.connect(gateway.database_url)
    await prepare(sql)
    await sql.execute(
        "create table public.captured (id integer primary key); select kafka.capture('public.captured', 'changes')"
    )
    await order(sql, 0, 30)
    await bill(sql, gateway.bootstrap, 29)
    await place.settled(gateway.database_url)
    await order(sql, 30, 20)
    backup, dump, records = tmp_path / "backup", tmp_path / "tables.dump", f"{place.location}-restored"
    output_of("backup", str(backup), "--database-url", gateway.database_url, "--log-store", place.location)
    subprocess.run(
        [bin_directory() / "pg_dump", "-Fc", "-n", "public", "-f", dump, gateway.database_url], check=True, timeout=60
    )
    await order(sql, 50, 10)
    await sql.close()
    gateway.stop()
    url = postgres.create(EMPTY)
    try:
        output_of("restore", str(backup), "--database-url", url, "--log-store", records)
        new = gateway_factory(
            place.settings, database_url=url, environment={**place.environment, "SLUICE_LOG_STORE": records}
        )
        subprocess.run(
            [bin_directory() / "pg_restore", "--clean", "--if-exists", "-d", url, dump], check=True, timeout=60
        )
        sql = await asyncpg.connect(url)
        await assert_restored(sql, new.bootstrap, 50, 30)
        await sql.execute("insert into public.captured values (1)")
        assert await sql.fetchval("select kafka.flush()")
        assert await sql.fetchval("select sum(end_offset) from kafka.partitions where topic = 'changes'") == 1
        await sql.close()
        await place.settled(url)
        new.stop()
        assert "are right" in output_of("check", "--database-url", url, "--log-store", records)
    finally:
        postgres.drop(url)


async def test_a_backup_with_a_captured_table_among_the_nodes_tables_is_refused(
    gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """The schema of functions for users, which the trigger of such a table needs, is not in a backup."""
    gateway = gateway_factory()
    assert gateway.database_url is not None
    create_topic(gateway, "orders", 1)
    sql = await asyncpg.connect(gateway.database_url)
    await sql.execute(
        "create table sluice.mine (id integer primary key); select kafka.capture('sluice.mine', 'changes')"
    )
    command = ("backup", str(tmp_path / "backup"), "--database-url", gateway.database_url)
    refused = sluice(*command)
    assert refused.returncode == 1
    assert "sluice.mine: a captured table among Sluice's own tables cannot be restored" in refused.stderr
    await sql.execute("alter table sluice.mine set schema public")
    await sql.close()
    output_of(*command)
