"""SQL roles that harm others, or try to."""

from __future__ import annotations

import json
import time

import asyncpg
import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient

from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.sql.conftest import create_topic
from tests.sql.reading import error, read, values
from tests.steps.waiting import until

Connection = asyncpg.Connection


async def test_headers_that_python_cannot_parse_stop_no_other_record(
    sql: Connection, topic: str, consumer: Consumer
) -> None:
    deep = "[" * 3000 + "]" * 3000
    for headers in ('{"n": 1e5000}', f'{{"deep": {deep}}}', '{"exact": 0.10, "long": 0.12345678901234567890123}'):
        await sql.execute("select kafka.produce($1, 'v', 'k', headers => $2::text::jsonb)", topic, headers)
    await sql.execute("select kafka.produce($1, 'after', 'k')", topic)
    assert await sql.fetchval("select kafka.flush('5 seconds')")
    found = read(consumer, topic, 4, none_more_s=0.3)
    assert values(found) == [b"v", b"v", b"v", b"after"]
    assert dict(found[0].headers()) == {"n": b"1" + b"0" * 5000}
    assert dict(found[1].headers()) == {"deep": deep.encode()}
    assert dict(found[2].headers()) == {"exact": b"0.10", "long": b"0.12345678901234567890123"}


@pytest.mark.parametrize(
    "headers",
    [
        "jsonb_build_object('h', repeat('x', 20000000))",
        "(select jsonb_object_agg(i, 1e100000) from generate_series(1, 200) i)",
    ],
    ids=["compressed", "numbers"],
)
async def test_headers_count_with_the_size_that_a_record_gives_them(sql: Connection, topic: str, headers: str) -> None:
    await sql.execute(f"create temporary table stored as select {headers} as headers")
    for call in (
        "select kafka.produce($1, 'v', headers => s.headers) from stored s",
        "select kafka.produce_many($1, array['v'], headers => array[s.headers]) from stored s",
    ):
        with pytest.raises(asyncpg.PostgresError) as refused:
            await sql.execute(call, topic)
        assert error(refused).sqlstate == "54000"
    assert await sql.fetchval("select count(*) from sluice.staged_record") == 0


async def test_a_kill_in_the_middle_of_a_large_transaction_loses_and_repeats_nothing(
    gateway_factory: GatewayFactory,
) -> None:
    gateway = gateway_factory()
    create_topic(gateway, "t", 1)
    assert gateway.database_url is not None
    sql = await asyncpg.connect(gateway.database_url)
    total = 100_000
    await sql.execute(
        "select kafka.produce_many('t', array(select n::text from generate_series(1, $1::integer) n))", total
    )
    # The relay has given some pieces their place in the log and stored their bytes. No reader sees them, but a sequence
    # of Postgres never rolls back.
    await until(
        lambda: sql.fetchval("select pg_sequence_last_value('sluice.inline_position') >= 3"), "the relay is at work"
    )
    gateway.kill()
    assert await sql.fetchval("select end_offset from kafka.partitions where topic = 't'") == 0
    gateway.restart()
    assert await sql.fetchval("select kafka.flush('60 seconds')")
    await sql.close()
    consumer = Consumer({"bootstrap.servers": gateway.bootstrap, "group.id": "g"})
    try:
        found = read(consumer, "t", total, partitions=1, none_more_s=0.3)
    finally:
        consumer.close()
    assert [int(value) for value in values(found)] == list(range(1, total + 1))


async def test_a_large_transaction_without_its_topic_is_written_once(gateway_factory: GatewayFactory) -> None:
    """All other records wait while it is written, and each attempt that is rolled back takes room on the disk."""
    gateway = gateway_factory()
    create_topic(gateway, "t", 1)
    assert gateway.database_url is not None
    sql = await asyncpg.connect(gateway.database_url)
    async with sql.transaction():
        await sql.execute("select kafka.produce_many('t', array(select n::text from generate_series(1, 20000) n))")
        await sql.execute("select kafka.produce('twin.a', 'v'), kafka.produce('twin_a', 'v')")

    def refusals() -> int:
        return gateway.log_text().count("wait for their topic")

    await until(refusals, "the second topic cannot be created")
    written = "select pg_sequence_last_value('sluice.inline_position')"
    before = await sql.fetchval(written)
    assert before is not None
    await until(refusals, "more attempts", holds=lambda count: count >= 3)
    assert await sql.fetchval(written) == before
    await sql.close()


async def test_transactions_that_lack_one_topic_cost_one_attempt(gateway_factory: GatewayFactory) -> None:
    """An application has committed them while no node served, and all later records wait for the attempts."""
    gateway = gateway_factory()
    for name in ("lacking_topic", "t"):
        create_topic(gateway, name, 1)
    gateway.stop()
    assert gateway.database_url is not None
    sql = await asyncpg.connect(gateway.database_url)
    await sql.execute(
        """insert into sluice.staged_record (xid, topic, value, timestamp_ms, arms)
        select -n, 'lacking.topic', 'v', 0, false from generate_series(1, 8000) n;
        insert into sluice.staged_commit (xid) select -n from generate_series(1, 8000) n;
        select kafka.produce('t', 'after')"""
    )
    gateway.restart()
    assert await sql.fetchval("select kafka.wait_for('t', 0, 0, '20 seconds')")
    await sql.close()


@pytest.mark.parametrize("name", ["__cluster_metadata", "__share_group_state"])
async def test_sql_creates_no_internal_topic(sql: Connection, name: str) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.execute("select kafka.produce($1, 'v')", name)
    assert error(refused).sqlstate == "42704"


async def test_a_partition_that_a_new_topic_lacks_costs_one_look(sql: Connection) -> None:
    await sql.execute(
        "select kafka.produce_many('new.beyond', array_fill('v'::text, array[20000]), partition => 1000000)"
    )
    assert await sql.fetchval("select kafka.flush('8 seconds')")


async def test_records_of_a_deleted_topic_are_one_line_of_the_log(
    sql: Connection, topic: str, gateway: GatewayProcess
) -> None:
    await sql.execute("begin")
    await sql.execute("select kafka.produce_many($1, array_fill('v'::text, array[5000]))", topic)
    admin = AdminClient({"bootstrap.servers": gateway.bootstrap})
    admin.delete_topics([topic])[topic].result(10)
    await sql.execute("commit")
    assert await sql.fetchval("select kafka.flush('8 seconds')")
    dropped = [json.loads(line) for line in gateway.log_text().splitlines() if "topic has been deleted" in line]
    assert [line["records"] for line in dropped] == [5000]


@pytest.mark.parametrize(
    "call",
    [
        "kafka.wait_for('{}', 0, 0, null)",
        "kafka.wait_for('{}', 0, null)",
        "kafka.flush(null)",
        "kafka.wait_for('{}', 0, 0, 'infinity')",
        "kafka.flush('infinity')",
    ],
)
async def test_a_wait_without_an_end_is_refused(sql: Connection, topic: str, call: str) -> None:
    if "infinity" in call and sql.get_server_version().major < 17:
        pytest.skip("intervals are finite before Postgres 17")
    await sql.execute("set statement_timeout = '2s'")
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.execute(f"select {call.format(topic)}")
    assert error(refused).sqlstate == "22004"


async def test_topics_that_cannot_be_created_delay_no_other_record(sql: Connection, topic: str) -> None:
    for number in range(300):
        async with sql.transaction():
            await sql.execute("select kafka.produce($1, 'v')", f"twin{number}.a")
            await sql.execute("select kafka.produce($1, 'v')", f"twin{number}_a")
    # Records wait for the topics of earlier records that can be created.
    created = "select count(*) from kafka.partitions where topic like 'twin%'"  # one topic of each pair
    await until(lambda: sql.fetchval(created), "300 topics are created", holds=lambda count: count == 300)
    taken: list[float] = []
    for _ in range(10):
        end = await sql.fetchval("select end_offset from kafka.partitions where topic = $1 and partition = 0", topic)
        started_s = time.monotonic()
        await sql.execute("select kafka.produce($1, 'after', partition => 0)", topic)
        assert await sql.fetchval("select kafka.wait_for($1, 0, $2)", topic, end)
        taken.append(time.monotonic() - started_s)
    assert sorted(taken)[5] < 0.5, taken
