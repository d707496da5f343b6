"""The relay among several nodes: take-over after a kill, and fetches that wait on other nodes."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from datetime import datetime
from itertools import count
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from gateway.log.append_listener import NO_LISTENER
from gateway.log.relay import Relay
from gateway.sql_door import door_settings
from storage.embedded import EmbeddedPostgres
from storage.errors import StorageError
from storage.migrate import migrate
from storage.pool import Database
from storage.sql_door import install
from storage.staged import StagedRecord, StagedRecords
from storage.types import NewBatch
from tests.cluster.conftest import Cluster, cluster
from tests.gateway.data_plane import data_plane
from tests.gateway_process import GatewayFactory
from tests.objects.records import moved
from tests.postgres import LoopThread, cluster_directory
from tests.sql.conftest import create_topic
from tests.sql.reading import DEADLINE_S, read, values
from tests.steps.waiting import until
from tests.storage.batches import new_batch

__all__ = ["cluster"]

ASLEEP = 1
"""State of a relay that waits for notifications, as sluice.staged_awake shows it."""
WAIT_S = 5.0
"""How long a fetch waits for records."""


async def test_another_node_takes_over_from_a_killed_relay(cluster: Cluster, database_url: str) -> None:
    nodes = cluster(2)
    create_topic(nodes[0], "t", 1)
    sql, other = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
    stopped = asyncio.Event()
    produced = 0

    async def produce() -> None:
        nonlocal produced
        for number in count():
            if stopped.is_set():
                return
            await sql.execute("select kafka.produce('t', $1, partition => 0)", str(number))
            produced += 1

    async def wait_for(more: int) -> None:
        wanted = produced + more
        await until(lambda: produced >= wanted, f"{more} more records")

    producing = asyncio.create_task(produce())
    # After the first kill, the next node to be killed is the relay.
    for node in (nodes[0], nodes[1], nodes[0]):
        await wait_for(200)
        node.kill()
        await wait_for(200)
        assert await other.fetchval("select kafka.flush('20 seconds')")
        await asyncio.to_thread(node.restart)
    stopped.set()
    await producing
    await sql.close()
    await other.close()
    consumer = Consumer({"bootstrap.servers": ",".join(node.bootstrap for node in nodes), "group.id": "g"})
    try:
        found = read(consumer, "t", produced, partitions=1, none_more_s=0.3)
    finally:
        consumer.close()
    assert [int(value) for value in values(found)] == list(range(produced))


async def test_fetches_that_wait_on_other_nodes_return_at_once(cluster: Cluster, database_url: str) -> None:
    nodes = cluster(2)
    partitions = 6
    create_topic(nodes[0], "t", partitions)
    described = AdminClient({"bootstrap.servers": nodes[0].bootstrap}).list_topics("t", timeout=10)
    leaders = {partition.leader for partition in described.topics["t"].partitions.values()}
    assert len(leaders) == 2
    consumer = Consumer(
        {"bootstrap.servers": nodes[0].bootstrap, "group.id": "g", "fetch.wait.max.ms": int(WAIT_S * 1000)}
    )
    consumer.assign([TopicPartition("t", partition, 0) for partition in range(partitions)])
    sql = await asyncpg.connect(database_url)
    try:
        taken: list[float] = []
        for number in range(4 * partitions):
            await sql.execute("select kafka.produce('t', $1, partition => $2)", str(number), number % partitions)
            start_s = time.monotonic()
            message = await asyncio.to_thread(consumer.poll, DEADLINE_S)
            assert message is not None
            assert message.value() == str(number).encode()
            taken.append(time.monotonic() - start_s)
    finally:
        await sql.close()
        consumer.close()
    # Each partition's first fetch arrives only after the client has found the partition's leader.
    assert max(taken[2 * partitions :]) < WAIT_S / 2, taken


async def test_a_relay_without_records_begins_quiet(gateway_factory: GatewayFactory) -> None:
    """While a relay polls, it looks every four milliseconds."""
    gateway = gateway_factory()
    sql = await asyncpg.connect(gateway.database_url)
    try:
        told = await until(lambda: sql.fetchval("select pg_sequence_last_value('sluice.staged_awake')"), "a relay")
        assert told == ASLEEP
    finally:
        await sql.close()


async def test_a_large_transaction_survives_the_move_of_its_bytes(
    gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """Slots hold records' bytes inline and are emptied once no chunk needs them. Chunks find bytes even if these were
    written before the offsets were given.
    """
    gateway = gateway_factory(
        {"log.store.roll.ms": "100", "log.retention.check.interval.ms": "200"},
        environment={"SLUICE_LOG_STORE": str(tmp_path / "log")},
    )
    assert gateway.database_url is not None
    create_topic(gateway, "t", 3)
    sql = await asyncpg.connect(gateway.database_url)
    await sql.execute(
        "select kafka.produce_many('t', array(select n::text from generate_series(1, 25000) n),"
        " array(select (n % 10)::text from generate_series(1, 25000) n))"
    )
    assert await sql.fetchval("select kafka.flush('120 seconds')", timeout=130)
    await sql.close()
    await moved(gateway.database_url)
    consumer = Consumer({"bootstrap.servers": gateway.bootstrap, "group.id": "g"})
    try:
        found = read(consumer, "t", 25_000)
    finally:
        consumer.close()
    assert sorted(int(value) for value in values(found)) == list(range(1, 25_001))


async def test_a_large_transaction_waits_for_a_locked_partition_without_beginning_again(
    gateway_factory: GatewayFactory,
) -> None:
    gateway = gateway_factory()
    assert gateway.database_url is not None
    create_topic(gateway, "t", 1)
    sql = await asyncpg.connect(gateway.database_url)
    holder = await asyncpg.connect(gateway.database_url)
    hold = holder.transaction()
    await hold.start()
    await holder.execute("select from sluice.partition for update")
    await sql.execute("select kafka.produce_many('t', array(select n::text from generate_series(1, 20000) n))")

    async def waiting() -> tuple[int, datetime] | None:
        """Return process id and start time of the relay's statement if the statement waits for a lock."""
        row = await sql.fetchrow(
            "select pid, query_start from pg_stat_activity"
            " where application_name = 'sluice relay' and wait_event_type = 'Lock'"
        )
        return None if row is None else (row["pid"], row["query_start"])

    first = await until(waiting, "the relay waits for the partition")

    async def again() -> tuple[int, datetime] | None:
        found = await waiting()
        return found if found is not None and found != first else None

    second = await until(again, "the relay waits a second time")
    assert first is not None
    assert second is not None
    assert second[0] == first[0], "a new session has written all bytes again"
    await hold.rollback()
    assert await sql.fetchval("select kafka.flush('60 seconds')", timeout=70)
    assert await sql.fetchval("select end_offset from kafka.partitions where topic = 't'") == 20_000
    await holder.close()
    await sql.close()


async def test_records_that_are_gone_when_they_are_appended_are_refused(cluster: Cluster, database_url: str) -> None:
    (node,) = cluster(1)
    create_topic(node, "t", 1)
    node.stop()
    sql = await asyncpg.connect(database_url)
    database = await Database.open(database_url)
    relay = await StagedRecords.open(database, lambda: None)
    try:
        await sql.execute("select kafka.produce('t', 'value', partition => 0)")
        assert await relay.try_own()
        transactions = await relay.look()
        assert [each.record_count for each in transactions] == [1]
        key = await sql.fetchval("select p.partition_key from sluice.partition p join sluice.topic t using (topic_id)")

        async def build(records: list[StagedRecord]) -> list[NewBatch]:
            assert [record.value for record in records] == [b"value"]
            await sql.execute("delete from sluice.staged_record")
            return [new_batch(key)]

        with pytest.raises(StorageError) as raised:
            await relay.append(transactions, build)
        assert "1 staged records were read and 0 are left" in str(raised.value.__cause__)
        assert await sql.fetchval("select count(*) from sluice.chunk where partition_key = $1", key) == 0
        assert await sql.fetchval("select count(*) from sluice.staged_commit") == 1
    finally:
        relay.close()
        await database.close()
        await sql.close()


async def test_an_append_of_unknown_outcome_leaves_the_known_ends_in_doubt(database_url: str) -> None:
    """The records may have become durable, and no node has announced them. So this node must look for itself."""
    async with data_plane(database_url) as plane:
        await install(plane.database, "kafka", door_settings(plane.catalog.broker))
        topic = await plane.create_topic("t")
        await plane.fill(topic, [100])
        loop = asyncio.get_running_loop()
        plane.tail.trust_since(loop.time())
        assert not plane.tail.doubtful(loop.time())

        async def create(name: str) -> str:
            return f"{name} exists"

        relay = Relay(
            plane.database, plane.catalog, plane.tail, create, listener=NO_LISTENER, now_ms=lambda: 1_700_000_000_000
        )
        sql, holder = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
        hold = holder.transaction()
        await hold.start()
        await holder.execute("select from sluice.partition for update")
        await sql.execute("select kafka.produce('t', 'value', partition => 0)")
        relaying = asyncio.create_task(relay.run())
        try:

            async def waiting() -> int | None:
                return await sql.fetchval(
                    "select pid from pg_stat_activity where application_name = 'sluice relay'"
                    " and datname = current_database() and wait_event_type = 'Lock'"
                )

            pid = await until(waiting, "the relay waits for the partition")
            assert await sql.fetchval("select pg_terminate_backend($1)", pid)
            with pytest.raises(StorageError):
                await relaying
        finally:
            relaying.cancel()
            await hold.rollback()
            await holder.close()
            await sql.close()
        assert plane.tail.doubtful(loop.time())


async def test_a_role_that_holds_the_lock_of_the_relay_is_named() -> None:
    loop = LoopThread()
    with cluster_directory() as directory:
        access = directory / "pg_hba.conf"
        access.write_text("local all all trust\n")
        access.chmod(0o644)
        server = EmbeddedPostgres(directory / "server", settings={"hba_file": str(access)})
        url = loop.run(server.start())
        database = await Database.open(url)
        await migrate(database)
        try:
            admin = await asyncpg.connect(url)
            await admin.execute("create role mallory login")
            await admin.close()
            foreign = await asyncpg.connect(url.replace("postgresql://sluice@", "postgresql://mallory@"))
            waiting = await StagedRecords.open(database, lambda: None)
            assert await foreign.fetchval("select pg_try_advisory_lock(771903215, 0)")
            assert not await waiting.try_own()
            assert await waiting.foreign_owner() == (foreign.get_server_pid(), "mallory")
            await foreign.close()
            await until(waiting.try_own, "the relay's lock")
            assert await waiting.foreign_owner() is None, "a node's own session"
            waiting.close()
        finally:
            await database.close()
            loop.run(server.stop())
    loop.close()


async def test_postgres_soon_probes_a_relay_that_is_silent() -> None:
    """If the relay's host vanishes, no other node can relay until Postgres has noticed it."""
    connections = Path("/proc/net/tcp")
    if not connections.exists():
        pytest.skip("only Linux shows the timers of connections")
    # An address that no other server on this port uses.
    number = os.getpid() % 60_000 + 300
    address = f"127.77.{number >> 8}.{number & 255}"
    loop = LoopThread()
    with cluster_directory() as directory:
        access = directory / "pg_hba.conf"
        access.write_text("local all all trust\nhost all all 127.0.0.0/8 trust\n")
        access.chmod(0o644)
        settings = {"hba_file": str(access), "listen_addresses": address}
        server = EmbeddedPostgres(directory / "server", settings=settings)
        url = loop.run(server.start())
        name, port = urlsplit(url), parse_qs(urlsplit(url).query)["port"][0]
        database = await Database.open(f"postgresql://{name.username}@{address}:{port}{name.path}?sslmode=disable")
        try:
            await database.close()
            relay = await StagedRecords.open(database, lambda: None)
            here = f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{int(port):04X}"

            def probes_in_s() -> float | None:
                """Return when Postgres probes the peer, unless bytes are on their way."""
                rows = [line.split() for line in connections.read_text().splitlines()]
                (timer,) = [row[5] for row in rows if row[1] == here and row[3] == "01"]
                kind, ticks = timer.split(":")
                return int(ticks, 16) / os.sysconf("SC_CLK_TCK") if kind == "02" else None

            wait_s = await until(probes_in_s, "the timer of a silent connection", holds=lambda found: found is not None)
            assert wait_s is not None
            assert wait_s < 60
            relay.close()
        finally:
            loop.run(server.stop())
    loop.close()
