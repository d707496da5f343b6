"""Views, records and waiting, for SQL clients."""

from __future__ import annotations

import json
import re
from pathlib import Path

import asyncpg
import pytest
from confluent_kafka import Consumer, Producer

from protocol.records import Record, build_batch
from storage.log import LogStore
from storage.pool import Database
from storage.types import NewBatch, PartitionKey
from tests.gateway_process import ROOT, GatewayFactory, GatewayProcess
from tests.objects.records import moved
from tests.sql.conftest import create_topic
from tests.storage.batches import append
from tests.storage.transactions import Producer as Transactional

Connection = asyncpg.Connection


async def test_records_reads_what_producers_and_sql_wrote(sql: Connection, topic: str, producer: Producer) -> None:
    producer.produce(
        topic, b"\x00raw", b"k1", partition=0, headers=[("h", b"1"), ("h", None)], timestamp=1_700_000_000_123
    )
    producer.produce(topic, None, b"k2", partition=0)
    assert producer.flush(10) == 0
    await sql.execute("select kafka.produce($1, 'from sql', 'k3', headers => '{\"a\": \"b\"}', partition => 0)", topic)
    assert await sql.fetchval("select kafka.wait_for($1, 0, 2)", topic)
    rows = await sql.fetch("select * from kafka.records($1, 0)", topic)
    assert [(row["offset"], row["key"], row["value"], row["headers"], row["note"]) for row in rows] == [
        (0, b"k1", b"\x00raw", '[["h", "1"], ["h", null]]', None),
        (1, b"k2", None, None, None),
        (2, b"k3", b"from sql", '[["a", "b"]]', None),
    ]
    assert round(rows[0]["timestamp"].timestamp() * 1000) == 1_700_000_000_123
    assert [row["offset"] for row in await sql.fetch("select * from kafka.records($1, 0, 1, 1)", topic)] == [1]


async def test_headers_are_read_by_a_session_with_another_syntax_of_strings(sql: Connection, topic: str) -> None:
    await sql.execute("select kafka.produce($1, 'v', headers => '{\"a\": \"b\"}', partition => 0)", topic)
    assert await sql.fetchval("select kafka.wait_for($1, 0, 0)", topic)
    await sql.execute("set standard_conforming_strings = off")
    assert await sql.fetchval("select headers from kafka.records($1, 0)", topic) == '[["a", "b"]]'


async def test_a_record_of_many_headers_is_read_in_time(sql: Connection, topic: str) -> None:
    """Reading a header costs the same, however many headers come before it."""
    headers = "(select jsonb_object_agg('h' || i, i::text) from generate_series(1, 60000) i)"
    await sql.execute(f"select kafka.produce($1, 'v', headers => {headers}, partition => 0)", topic)
    assert await sql.fetchval("select kafka.wait_for($1, 0, 0)", topic)
    await sql.execute("set statement_timeout = '5s'")
    row = await sql.fetchrow("select * from kafka.records($1, 0)", topic)
    assert row is not None
    assert dict(json.loads(row["headers"])) == {f"h{i}": str(i) for i in range(1, 60_001)}


@pytest.mark.parametrize("committed", [True, False])
async def test_records_hides_an_open_transaction_behind_other_batches_of_its_chunk(
    sql: Connection, topic: str, gateway: GatewayProcess, committed: bool
) -> None:
    """One commit of a node appends the batches of all producers that wait, so they share a chunk."""
    assert gateway.database_url is not None
    database = await Database.open(gateway.database_url, hot_connections=1, cold_connections=1)
    log = LogStore(database, None, inline_max_bytes=0)
    find = """select p.partition_key from sluice.partition p join sluice.topic t using (topic_id)
        where t.name = $1 and p.partition_index = 0"""
    found = await sql.fetchval(find, topic)
    assert isinstance(found, int)
    key = PartitionKey(found)
    transactional = Transactional(database, log, 70_000 + committed)
    await transactional.take_in(key)
    plain = NewBatch(key, bytearray(build_batch([Record(0, 1_000, b"k", b"plain")])), 1, 1_000)
    assert await append(log, plain, transactional.batch(key, (b"k", b"open")), plain) == [0, 1, 2]
    read = 'select "offset", value from kafka.records($1, 0)'
    assert [tuple(row) for row in await sql.fetch(read, topic)] == [(0, b"plain")]
    await transactional.end(committed=committed)
    shown = [(0, b"plain"), (1, b"open"), (2, b"plain")] if committed else [(0, b"plain"), (2, b"plain")]
    assert [tuple(row) for row in await sql.fetch(read, topic)] == shown
    # Other tests share this gateway, and one of them expects that no transactional id is in use.
    await sql.execute(
        "delete from sluice.transactional_producer where transactional_id = $1", transactional.transactional_id
    )
    await log.close()
    await database.close()


async def test_records_names_the_range_that_it_cannot_read(sql: Connection, gateway: GatewayProcess) -> None:
    create_topic(gateway, "squeezed", 1, compression_type="gzip")
    await sql.execute("select kafka.produce('squeezed', 'v')")
    assert await sql.fetchval("select kafka.wait_for('squeezed', 0, 0)")
    (row,) = await sql.fetch("select * from kafka.records('squeezed', 0)")
    assert (row["offset"], row["value"]) == (0, None)
    assert "offsets 0 to 0 are compressed" in row["note"]


async def test_records_names_the_range_that_lies_in_segments(gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    gateway = gateway_factory(
        {"log.store.roll.ms": "100", "log.retention.check.interval.ms": "200"},
        environment={"SLUICE_LOG_STORE": str(tmp_path / "log")},
    )
    assert gateway.database_url is not None
    create_topic(gateway, "t", 1)
    sql = await asyncpg.connect(gateway.database_url)
    await sql.execute("select kafka.produce_many('t', array['a', 'b', 'c'])")
    assert await sql.fetchval("select kafka.flush()")
    await moved(gateway.database_url)
    await sql.close()
    gateway.stop()  # later records stay in Postgres
    sql = await asyncpg.connect(gateway.database_url)
    (row,) = await sql.fetch("select * from kafka.records('t', 0)")
    assert (row["offset"], row["value"]) == (0, None)
    assert "offsets 0 to 2 " in row["note"]
    assert "Kafka client" in row["note"]
    await sql.close()


async def test_the_page_names_the_columns_of_each_view(sql: Connection) -> None:
    documented: dict[str, set[str]] = {}
    view = ""
    for line in (ROOT / "docs" / "sql.md").read_text(encoding="utf-8").splitlines():
        cells = line.split("|")
        if line.startswith("| `kafka."):
            view = cells[1].strip().strip("`").removeprefix("kafka.")
            documented[view] = set()
        elif line.startswith("| `") and view:
            documented[view] |= set(re.findall(r"`([a-z_]+)`", cells[1]))
        elif not line.startswith("|"):
            view = ""
    rows = await sql.fetch(
        "select table_name, column_name from information_schema.columns where table_schema = 'kafka'"
    )
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row["table_name"], set()).add(row["column_name"])
    assert documented == found


async def test_timestamps_that_postgres_cannot_hold_hide_nothing(
    sql: Connection, gateway: GatewayProcess, producer: Producer
) -> None:
    create_topic(gateway, "nanoseconds", 1, message_timestamp_after_max_ms=str(2**63 - 1))
    producer.produce("nanoseconds", b"v", timestamp=1_700_000_000_000_000_000, partition=0)
    assert producer.flush(10) == 0
    row = await sql.fetchrow("select * from kafka.partitions where topic = 'nanoseconds'")
    assert row is not None
    assert (row["end_offset"], row["newest_record_at"]) == (1, None)
    row = await sql.fetchrow("select * from kafka.records('nanoseconds', 0)")
    assert row is not None
    assert (row["value"], row["timestamp"]) == (b"v", None)


async def test_flush_waits_for_what_was_committed(sql: Connection, topic: str) -> None:
    for number in range(20):
        await sql.execute("select kafka.produce($1, 'v', partition => 0)", topic)
        assert await sql.fetchval("select kafka.flush()")
        end = await sql.fetchval("select end_offset from kafka.partitions where topic = $1 and partition = 0", topic)
        assert end == number + 1


async def test_waiting_in_one_snapshot_is_refused(sql: Connection, topic: str) -> None:
    async with sql.transaction(isolation="repeatable_read"):
        with pytest.raises(asyncpg.ActiveSQLTransactionError, match="repeatable read"):
            await sql.fetchval("select kafka.wait_for($1, 0, 0)", topic)
    assert not await sql.fetchval("select kafka.wait_for($1, 0, 99, '10 ms')", topic)


async def test_no_number_of_records_is_refused(sql: Connection, topic: str) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match="and NULL"):
        await sql.fetch("select * from kafka.records($1, 0, 0, null)", topic)


async def test_views_show_topics_groups_and_members(
    sql: Connection, topic: str, gateway: GatewayProcess, producer: Producer
) -> None:
    await sql.execute("select kafka.produce($1, 'v', partition => $2)", topic, 0)
    consumer = Consumer({"bootstrap.servers": gateway.bootstrap, "group.id": "viewed", "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    for _ in range(200):
        if consumer.poll(0.1) is not None:
            break
    consumer.commit(asynchronous=False)
    row = await sql.fetchrow("select * from kafka.topics where topic = $1", topic)
    assert row is not None
    assert row["partitions"] == 3
    row = await sql.fetchrow("select * from kafka.partitions where topic = $1 and partition = 0", topic)
    assert row is not None
    assert (row["start_offset"], row["end_offset"], row["last_stable_offset"]) == (0, 1, 1)
    row = await sql.fetchrow("select * from kafka.groups where group_id = 'viewed'")
    assert row is not None
    assert (row["type"], row["state"], row["members"]) == ("classic", "Stable", 1)
    for _ in range(100):
        row = await sql.fetchrow("select * from kafka.members where group_id = 'viewed'")
        assert row is not None
        if row["owns"]:
            break
        consumer.poll(0.05)
    assert row["owns"] == [f"{topic}-{index}" for index in range(3)]
    assert await sql.fetchval("select lag from kafka.lag where group_id = 'viewed' and partition = 0") == 0
    assert await sql.fetchval("select count(*) from kafka.nodes where alive") == 1
    assert await sql.fetchval("select count(*) > 0 from kafka.journal where group_id = 'viewed'")
    assert await sql.fetch("select * from kafka.transactions") == []
    consumer.close()
