"""kafka.produce inside transactions of SQL clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # pyright: ignore[reportPrivateImportUsage]

from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.sql.conftest import create_topic
from tests.sql.reading import error, read, values
from tests.steps.waiting import until

Connection = asyncpg.Connection
EARLY = "set constraints all immediate"
EARLY_IN_A_FUNCTION = "do $$ begin set constraints all immediate; end $$"
EARLY_TWICE = "do $$ begin set constraints all immediate; set constraints all immediate; end $$"
EARLY_AND_AGAIN = "set constraints all immediate; set constraints all immediate"
EARLY_BEHIND_A_COMMENT = "set/**/constraints all immediate"
EARLY_BY_OTHER_STRINGS = "set standard_conforming_strings = off; set constraints all immediate"
EARLY_BEHIND_A_LINE = r"""do $$ begin for i in 1..2 loop execute E'set\nconstraints all immediate'; end loop; end $$"""
EARLY_BEHIND_LINES = r"""create or replace function fire_behind_lines() returns void language plpgsql as
$$ begin for i in 1..2 loop execute E'\n\nset con' || 'straints all immediate'; end loop; end $$;
select fire_behind_lines()"""
EARLY_IN_SQL = """create or replace function fire_twice() returns void language sql as
$$ set constraints all immediate; set constraints all immediate $$;
select fire_twice()"""


def of_key(messages: list[Any], key: bytes) -> list[bytes | None]:
    return [message.value() for message in messages if message.key() == key]


async def test_a_committed_record_reaches_a_stock_consumer(sql: Connection, topic: str, consumer: Consumer) -> None:
    async with sql.transaction():
        await sql.execute("create table orders (id integer primary key, total numeric)")
        await sql.execute("insert into orders values (4711, 99.90)")
        await sql.execute(
            f"""select kafka.produce('{topic}', key => '4711', value => '{{"total": 99.90}}',
                headers => '{{"source": "shop", "none": null}}', "timestamp" => '2026-01-02 03:04:05.678+00')"""
        )
    (message,) = read(consumer, topic, 1, none_more_s=0.3)
    assert (message.key(), message.value(), message.offset()) == (b"4711", b'{"total": 99.90}', 0)
    assert dict(message.headers()) == {"source": b"shop", "none": None}
    assert message.timestamp()[1] == 1767323045678


async def test_rolled_back_records_are_gone(sql: Connection, topic: str, consumer: Consumer) -> None:
    await sql.execute("begin")
    await sql.execute("select kafka.produce($1, 'rolled back')", topic)
    await sql.execute("rollback")
    async with sql.transaction():
        await sql.execute("savepoint first")
        await sql.execute("select kafka.produce($1, 'rolled back to a savepoint', partition => 0)", topic)
        await sql.execute("rollback to savepoint first")
        await sql.execute("select kafka.produce($1, 'kept', partition => 0)", topic)
        await sql.execute("savepoint second")
        await sql.execute("select kafka.produce($1, 'rolled back, too', partition => 0)", topic)
        await sql.execute("rollback to savepoint second")
        await sql.execute("savepoint third")
        await sql.execute("select kafka.produce($1, 'released', partition => 0)", topic)
        await sql.execute("release savepoint third")
    assert values(read(consumer, topic, 2, none_more_s=0.3)) == [b"kept", b"released"]


async def test_types_of_values_and_keys(sql: Connection, topic: str, consumer: Consumer) -> None:
    call = "select kafka.produce('{}', {}, partition => 0)"
    for arguments in (
        "value => 'text'",
        "'text', 'key'",
        "value => 'bytes'::bytea, key => 'key'",
        "'bytes'::bytea, '\\x00ff'::bytea",
        "'{\"a\": 1}'::jsonb",
        "'[1]'::jsonb, key => 'key'::bytea",
        "value => null, key => 'tombstone'",
        "''",
    ):
        await sql.execute(call.format(topic, arguments))
    found = [(message.key(), message.value()) for message in read(consumer, topic, 8)]
    assert found == [
        (None, b"text"),
        (b"key", b"text"),
        (b"key", b"bytes"),
        (b"\x00\xff", b"bytes"),
        (None, b'{"a": 1}'),
        (b"key", b"[1]"),
        (b"tombstone", None),
        (None, b""),
    ]


# --- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("produce_first", [True, False])
@pytest.mark.parametrize(
    "early",
    [
        "",
        EARLY,
        EARLY_IN_A_FUNCTION,
        EARLY_TWICE,
        EARLY_AND_AGAIN,
        EARLY_BEHIND_A_COMMENT,
        EARLY_BY_OTHER_STRINGS,
        EARLY_BEHIND_A_LINE,
        EARLY_BEHIND_LINES,
        EARLY_IN_SQL,
    ],
    ids=["late", "early", "function", "twice", "again", "comment", "strings", "line", "lines", "sql"],
)
async def test_records_of_a_row_have_the_order_of_its_locks(
    sql: Connection, other: Connection, topic: str, consumer: Consumer, *, produce_first: bool, early: str
) -> None:
    await sql.execute("drop table if exists account; create table account (id int primary key, balance int)")
    await sql.execute("insert into account values (1, 0)")
    for round_number in range(5):
        await sql.execute("begin")
        if produce_first:
            await sql.execute("select kafka.produce($1, $2, 'k')", topic, f"{round_number} second")
            if early:
                await sql.execute(early)
        await other.execute("begin")
        await other.execute("update account set balance = balance + 1 where id = 1")
        await other.execute("select kafka.produce($1, $2, 'k')", topic, f"{round_number} first")
        if early and not produce_first:
            await other.execute(early)
        waiting = asyncio.ensure_future(sql.execute("update account set balance = balance + 1 where id = 1"))
        await other.execute("commit")
        await waiting
        if not produce_first:
            await sql.execute("select kafka.produce($1, $2, 'k')", topic, f"{round_number} second")
        await sql.execute("commit")
    expected = [f"{number} {which}".encode() for number in range(5) for which in ("first", "second")]
    assert of_key(read(consumer, topic, 10, none_more_s=0.2), b"k") == expected


@pytest.mark.parametrize("early", ["", EARLY, EARLY_IN_A_FUNCTION, EARLY_TWICE])
async def test_an_open_transaction_delays_no_other(
    sql: Connection, other: Connection, topic: str, consumer: Consumer, producer: Producer, early: str
) -> None:
    await sql.execute("begin")
    await sql.execute("select kafka.produce($1, 'late', partition => 0)", topic)
    if early:
        await sql.execute(early)
    await other.execute("select kafka.produce($1, 'early', partition => 0)", topic)
    producer.produce(topic, b"by a client", partition=0)
    assert producer.flush(10) == 0
    assert set(values(read(consumer, topic, 2, none_more_s=0.2))) == {b"early", b"by a client"}
    await sql.execute("commit")
    assert values(read(consumer, topic, 3))[2] == b"late"


async def test_records_of_one_transaction_stay_together_and_in_order(
    sql: Connection, other: Connection, topic: str, consumer: Consumer
) -> None:
    await sql.execute("begin")
    await other.execute("begin")
    for number in range(20):
        await sql.execute("select kafka.produce($1, $2, partition => 0)", topic, f"a{number}")
        await other.execute("select kafka.produce($1, $2, partition => 0)", topic, f"b{number}")
    await other.execute("commit")
    await sql.execute("commit")
    expected = [f"{which}{number}".encode() for which in "ba" for number in range(20)]
    assert values(read(consumer, topic, 40)) == expected


async def test_concurrent_serializable_transactions_produce(
    sql: Connection, other: Connection, topic: str, consumer: Consumer
) -> None:
    """They have nothing in common, so Postgres has no reason to fail one of them."""
    for connection in (sql, other):
        await connection.execute("begin isolation level serializable")
    for call in (
        "kafka.produce($1, 'v')",
        "kafka.produce($1, 'v', partition => 0)",
        "kafka.produce_many($1, array['v'])",
    ):
        for connection in (sql, other):
            await connection.execute(f"select {call}", topic)
    for connection in (sql, other):
        await connection.execute("commit")
    read(consumer, topic, 6, none_more_s=0.1)


# --- two-phase commit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "prepare transaction 'x'",
        "PREPARE  TRANSACTION 'x';",
        "/* trace=1 */ prepare /* - */ transaction 'x'; -- a comment",
        "-- a comment\nprepare transaction $id$x$id$ /* a ** comment */",
    ],
)
async def test_prepare_transaction_is_refused(sql: Connection, topic: str, statement: str) -> None:
    await sql.execute("begin")
    await sql.execute("select kafka.produce($1, 'x')", topic)
    with pytest.raises(asyncpg.FeatureNotSupportedError, match="cannot be prepared for two-phase commit") as refused:
        await sql.execute(statement)
    assert "COMMIT" in error(refused).hint


async def test_a_value_that_speaks_of_two_phase_commit_is_no_two_phase_commit(
    sql: Connection, topic: str, consumer: Consumer
) -> None:
    await sql.execute(f"select kafka.produce('{topic}', 'x; prepare transaction ''y''')")
    await sql.execute(f"select kafka.produce('{topic}', 'x; prepare transaction ''y'' --')")
    await sql.execute(f"select kafka.produce('{topic}', $$x; prepare transaction 'y'$$)")
    await sql.execute(f"select kafka.produce('{topic}', 'set constraints all immediate')")
    assert len(read(consumer, topic, 4)) == 4


async def test_a_text_that_often_says_constraints_commits_in_time(sql: Connection, topic: str) -> None:
    """Each word could belong to a SET CONSTRAINTS, which would fire the trigger before the commit."""
    async with asyncio.timeout(20):
        await sql.execute(f"select kafka.produce('{topic}', '{'constraints ' * 20_000}')")


# --- partitions ---------------------------------------------------------------------------------------------------


async def test_sql_and_a_stock_producer_choose_the_same_partition(
    sql: Connection, topic: str, consumer: Consumer, producer: Producer
) -> None:
    for number in range(50):
        await sql.execute("select kafka.produce($1, 'sql', $2)", topic, f"key-{number}")
        producer.produce(topic, b"client", f"key-{number}".encode())
    assert producer.flush(10) == 0
    placed: dict[bytes, set[int]] = {}
    for message in read(consumer, topic, 100):
        placed.setdefault(message.key(), set()).add(message.partition())
    assert all(len(partitions) == 1 for partitions in placed.values())
    assert len(set.union(*placed.values())) == 3


async def test_records_without_a_key_stay_in_one_partition_of_a_transaction(
    sql: Connection, topic: str, consumer: Consumer
) -> None:
    for transaction in range(6):
        async with sql.transaction():
            for _ in range(3):
                await sql.execute("select kafka.produce($1, $2)", topic, str(transaction))
    placed: dict[bytes, set[int]] = {}
    for message in read(consumer, topic, 18):
        placed.setdefault(message.value(), set()).add(message.partition())
    assert all(len(partitions) == 1 for partitions in placed.values())
    assert len(set.union(*placed.values())) > 1


async def test_an_unknown_topic_is_created_if_the_broker_creates_topics(sql: Connection, consumer: Consumer) -> None:
    async with sql.transaction():
        assert await sql.fetchval("select kafka.produce('created-by-sql', 'one', 'k')") is None
        await sql.execute("select kafka.produce_many('created-by-sql', array['two', 'three'], array['k', 'k'])")
    assert values(read(consumer, "created-by-sql", 3, partitions=1)) == [b"one", b"two", b"three"]
    await sql.execute("select kafka.produce('created-by-sql', 'four')")
    assert values(read(consumer, "created-by-sql", 4, partitions=1))[3] == b"four"


# --- many ---------------------------------------------------------------------------------------------------------


async def test_produce_many_keeps_order_keys_and_headers(sql: Connection, topic: str, consumer: Consumer) -> None:
    total = await sql.fetchval(
        """select kafka.produce_many($1, array['a', null, 'c'], keys => array['k1', 'k2', null],
            headers => array['{"n": 1}', null, '{}']::jsonb[], partition => 1)""",
        topic,
    )
    assert total == 3
    found = [(message.key(), message.value(), message.headers()) for message in read(consumer, topic, 3)]
    assert found == [(b"k1", b"a", [("n", b"1")]), (b"k2", None, None), (None, b"c", None)]


async def test_a_transaction_larger_than_one_append_arrives_whole(
    sql: Connection, topic: str, consumer: Consumer
) -> None:
    async with sql.transaction():
        await sql.execute(
            "select kafka.produce_many($1, array(select n::text from generate_series(1, 25000) n), partition => 0)",
            topic,
        )
        await sql.execute(
            "select kafka.produce_many($1, array_fill(repeat('x', 900000), array[12]), partition => 1)", topic
        )
    found = read(consumer, topic, 25_012)
    assert [int(m.value()) for m in found if m.partition() == 0] == list(range(1, 25_001))
    assert [len(m.value()) for m in found if m.partition() == 1] == [900_000] * 12


@pytest.mark.timeout(400)
async def test_records_of_a_large_transaction_become_visible_together(
    sql: Connection, other: Connection, gateway: GatewayProcess, consumer: Consumer
) -> None:
    names = [f"large-{number}" for number in range(3)]
    for name in names:
        create_topic(gateway, name, 2)
    each = 70_000
    admin = AdminClient({"bootstrap.servers": gateway.bootstrap})
    places = [TopicPartition(name, index) for name in names for index in range(2)]

    def ends_of_a_client() -> int:
        # One node leads all partitions, so the client sends one request, and the node answers from one snapshot.
        asked: dict[TopicPartition, Any] = {place: OffsetSpec.latest() for place in places}
        found = admin.list_offsets(asked, request_timeout=30)
        return sum(future.result(30).offset for future in found.values())

    seen_by_sql: set[int] = set()
    seen_by_clients: set[int] = set()
    async with sql.transaction():
        for name in names:
            await sql.execute(
                "select kafka.produce_many($1, array(select n::text from generate_series(1, $2) n),"
                " array(select (n % 100)::text from generate_series(1, $2) n))",
                *(name, each),
                timeout=120,
            )
    flushed = asyncio.ensure_future(sql.fetchval("select kafka.flush('300 seconds')", timeout=330))
    while not flushed.done():
        ends: Any = await other.fetchval(
            "select sum(end_offset)::bigint from kafka.partitions where topic = any ($1)", names
        )
        seen_by_sql.add(ends)
        seen_by_clients.add(await asyncio.to_thread(ends_of_a_client))
    assert flushed.result()
    seen_by_clients.add(await asyncio.to_thread(ends_of_a_client))
    assert 0 in seen_by_sql, "this reader came too late to see anything"
    assert seen_by_sql <= {0, 3 * each}
    assert seen_by_clients <= {0, 3 * each}
    assert 3 * each in seen_by_clients
    consumer.assign([TopicPartition(place.topic, place.partition, 0) for place in places])
    found: dict[tuple[str, bytes], list[int]] = {}
    while sum(map(len, found.values())) < 3 * each:
        messages = consumer.consume(10_000, 30)
        assert messages, "no more records come"
        for message in messages:
            assert message.error() is None, message.error()
            found.setdefault((str(message.topic()), message.key() or b""), []).append(int(message.value() or b""))
    assert len(found) == 300
    for (_, key), numbers in found.items():
        assert numbers == list(range(int(key) or 100, each + 1, 100)), key


# --- topics' settings ---------------------------------------------------------------------------------------------


async def test_compression_and_append_time_are_the_topics(
    sql: Connection, gateway: GatewayProcess, consumer: Consumer
) -> None:
    create_topic(gateway, "stamped", 1, message_timestamp_type="LogAppendTime", compression_type="zstd")
    await sql.execute("select kafka.produce('stamped', repeat('x', 10000), \"timestamp\" => '2001-01-01')")
    (message,) = read(consumer, "stamped", 1, partitions=1)
    assert message.timestamp()[0] == 2
    assert message.timestamp()[1] > 1_600_000_000_000
    size: Any = await sql.fetchval(
        "select max(length(records)) from sluice.inline_records where "
        "partition_key = (select partition_key from sluice.topic_partition where topic = 'stamped')"
    )
    assert size < 1000


async def test_records_of_sql_are_compacted_like_any_other(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory({"log.cleaner.backoff.ms": "100"})
    assert gateway.database_url is not None
    create_topic(gateway, "kept", 1, cleanup_policy="compact", segment_ms="100", min_cleanable_dirty_ratio="0.01")
    sql = await asyncpg.connect(gateway.database_url)

    async def produce(key: str, value: str | None) -> None:
        await sql.execute("select kafka.produce('kept', $1::text, $2::text)", value, key)
        assert await sql.fetchval("select kafka.flush('60 seconds')")

    for number in range(30):
        await produce(f"key-{number % 3}", str(number))
    offsets: list[Any] = []

    async def cleaned() -> bool:
        # The newest batch is never compacted, so another batch must follow.
        await produce("last", "x")
        rows = await sql.fetch("select \"offset\", key from kafka.records('kept', 0, 0, 1000) where note is null")
        offsets[:] = [row["offset"] for row in rows if row["key"] != b"last"]
        return len(offsets) == 3

    await until(cleaned, "compaction keeps the newest record of each key")
    assert offsets == [27, 28, 29]
    await sql.close()


async def test_records_of_sql_expire_by_their_own_timestamps(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory({"log.retention.check.interval.ms": "100"})
    assert gateway.database_url is not None
    create_topic(gateway, "expiring", 1, retention_ms=str(24 * 3_600_000), segment_ms="100")
    sql = await asyncpg.connect(gateway.database_url)
    old = "select kafka.produce('expiring', 'old', \"timestamp\" => now() - interval '2 days')"
    for statement in (old, "select kafka.produce('expiring', 'new')", "select kafka.produce('expiring', 'newest')"):
        await sql.execute(statement)
        assert await sql.fetchval("select kafka.flush('60 seconds')")

    async def start_offset() -> int:
        return int(await sql.fetchval("select start_offset from kafka.partitions where topic = 'expiring'"))

    await until(start_offset, "retention removes the old record", holds=lambda offset: offset == 1)
    rows = await sql.fetch("select value from kafka.records('expiring', 0, 0, 10) where note is null")
    assert [row["value"] for row in rows] == [b"new", b"newest"]
    await sql.close()


async def test_read_committed_consumers_read_records_of_sql_once_earlier_transactions_have_ended(
    sql: Connection, topic: str, gateway: GatewayProcess
) -> None:
    producer = Producer({"bootstrap.servers": gateway.bootstrap, "transactional.id": topic[:100]})
    producer.init_transactions(30)
    await sql.execute("select kafka.produce($1, 'first', partition => 0)", topic)
    assert await sql.fetchval("select kafka.flush()")
    producer.begin_transaction()
    producer.produce(topic, b"aborted", partition=0)
    assert producer.flush(30) == 0
    await sql.execute("select kafka.produce($1, 'second', partition => 0)", topic)
    assert await sql.fetchval("select kafka.flush()")
    settings = {"bootstrap.servers": gateway.bootstrap, "group.id": "levels", "enable.auto.commit": False}
    committed = Consumer({**settings, "isolation.level": "read_committed"})
    uncommitted = Consumer({**settings, "isolation.level": "read_uncommitted"})
    try:
        assert values(read(uncommitted, topic, 3)) == [b"first", b"aborted", b"second"]
        assert values(read(committed, topic, 1, none_more_s=0.3)) == [b"first"]
        producer.abort_transaction(30)
        assert values(read(committed, topic, 2, none_more_s=0.3)) == [b"first", b"second"]
    finally:
        committed.close()
        uncommitted.close()


# --- bad input ----------------------------------------------------------------------------------------------------

REFUSED = [
    ("null, 'v'", "22004", "topic is NULL"),
    ("'no such topic!', 'v'", "42602", "no legal topic name"),
    ("'__consumer_offsets', 'v', 'k'", "42501", "__consumer_offsets is internal"),
    ("'{topic}', 'v', partition => -1", "22023", "partition -1 is negative"),
    ("'{topic}', 'v', partition => 3", "22023", "has no partition 3: it has 3"),
    ("'{topic}', 'v', headers => '[1]'", "22023", "headers must be a JSON object, not array"),
    ("'{topic}', 'v', headers => '1'", "22023", "headers must be a JSON object, not number"),
    ("'{topic}', repeat('x', 1048588)", "54000", "exceeds max.message.bytes, which is 1048588"),
    ("'{topic}', convert_from('\\xff', 'UTF8')", "22021", "invalid byte sequence"),
    ("'{topic}', repeat('x', 2000000000)", "54000", "too large"),
    ("replace('{topic}', '_', '.'), 'v'", "42710", "collides with topic"),
]


@pytest.mark.parametrize(("arguments", "sqlstate", "text"), REFUSED)
async def test_bad_input_fails_the_transaction(
    sql: Connection, topic: str, consumer: Consumer, arguments: str, sqlstate: str, text: str
) -> None:
    await sql.execute("begin")
    await sql.execute("select kafka.produce($1, 'before')", topic)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.execute(f"select kafka.produce({arguments})".replace("{topic}", topic))
    assert error(refused).sqlstate.startswith(sqlstate), refused.value
    assert text in str(refused.value)
    await sql.execute("rollback")
    await sql.execute("select kafka.produce($1, 'after')", topic)
    assert values(read(consumer, topic, 1, none_more_s=0.1)) == [b"after"]


@pytest.mark.parametrize("call", ["kafka.produce($1, 'v', ", "kafka.produce_many($1, array['v'], "])
async def test_timestamps_outside_of_the_topics_limits_are_refused(
    sql: Connection, gateway: GatewayProcess, topic: str, call: str
) -> None:
    bounded, stamped = f"{topic[:200]}-bounded", f"{topic[:200]}-stamped"
    create_topic(gateway, bounded, 1, message_timestamp_before_max_ms="60000", message_timestamp_after_max_ms="60000")
    create_topic(gateway, stamped, 1, message_timestamp_type="LogAppendTime")
    produce = f'select {call} "timestamp" => clock_timestamp() + $2::text::interval)'
    for name, accepted, refused in (
        (topic, ("59 minutes", "-10 years"), ("61 minutes", "-100 years")),
        (bounded, ("50 seconds", "-50 seconds"), ("70 seconds", "-70 seconds")),
        (stamped, ("1 day", "-100 years"), ()),
    ):
        for distance in accepted:
            await sql.execute(produce, name, distance)
        for distance in refused:
            with pytest.raises(asyncpg.DatetimeFieldOverflowError, match=f"topic {name}: the timestamp") as raised:
                await sql.execute(produce, name, distance)
            assert "message.timestamp.after.max.ms" in error(raised).hint
    with pytest.raises(asyncpg.DatetimeFieldOverflowError, match="no point in time"):
        await sql.execute(f"select {call} \"timestamp\" => 'infinity')", topic)


async def test_the_largest_record_that_is_accepted_fits_max_message_bytes(
    sql: Connection, gateway: GatewayProcess, consumer: Consumer
) -> None:
    create_topic(gateway, "small", 1, max_message_bytes="200")
    # The batch header has 61 bytes. The record adds 9: its length, attributes, two deltas, key, length of the value,
    # headers.
    await sql.execute("select kafka.produce('small', repeat('x', 130))")
    with pytest.raises(asyncpg.ProgramLimitExceededError, match="topic small: a record of 201 bytes") as refused:
        await sql.execute("select kafka.produce('small', repeat('x', 131))")
    assert "small" in error(refused).hint
    assert len(read(consumer, "small", 1, partitions=1)) == 1


@pytest.mark.parametrize(
    "call",
    ["kafka.produce($1, value)", "kafka.produce($1, value, partition => 0)", "kafka.produce_many($1, array[value])"],
)
async def test_a_record_that_no_client_can_produce_is_refused(
    sql: Connection, gateway: GatewayProcess, topic: str, call: str
) -> None:
    """A node that relays it would need several times its size in memory, and so would each node that takes over."""
    huge = f"{topic[:200]}-huge"
    create_topic(gateway, huge, 1, max_message_bytes=str(2**31 - 1))
    async with sql.transaction():
        with pytest.raises(asyncpg.ProgramLimitExceededError, match="exceeds the limit of SQL, which is 104857600"):
            async with sql.transaction():
                await sql.execute(f"select {call} from (select repeat('x', 104857600) as value) given", huge)
        assert await sql.fetchval("select count(*) from sluice.staged_record where topic_id is not null") == 0


async def test_a_compacted_topic_refuses_records_without_a_key(sql: Connection, gateway: GatewayProcess) -> None:
    create_topic(gateway, "compacted", 1, cleanup_policy="compact")
    for call in ("kafka.produce('compacted', 'v')", "kafka.produce_many('compacted', array['v'])"):
        with pytest.raises(asyncpg.NullValueNotAllowedError, match="compacted is compacted"):
            await sql.execute(f"select {call}")


@pytest.mark.parametrize(
    ("arguments", "sqlstate"),
    [
        ("null::text[]", "22004"),
        ("array['a', 'b'], array['k']", "2202E"),
        ("array['a'], headers => array['[]']::jsonb[]", "22023"),
        ("array['a', repeat('x', 1048588)]", "54000"),
        ("array['a'], partition => 9", "22023"),
    ],
)
async def test_bad_input_of_many_fails(sql: Connection, topic: str, arguments: str, sqlstate: str) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.execute(f"select kafka.produce_many('{topic}', {arguments})")
    assert error(refused).sqlstate == sqlstate


async def test_a_record_costs_the_same_however_many_its_transaction_has(sql: Connection, topic: str) -> None:
    count = 10_000
    plan: Any = await sql.fetchval(
        "explain (analyze, buffers, timing off, format json)"
        f" select kafka.produce('{topic}', 'v') from generate_series(1, {count})"
    )
    assert json.loads(plan)[0]["Plan"]["Shared Hit Blocks"] < 15 * count


async def test_no_call_is_compiled(sql: Connection, topic: str) -> None:
    """It would take a thousand times as long. Before 18, Postgres compiles a plan with a scan that is switched off."""
    said: list[str] = []
    await sql.execute("set jit = on")
    if not await sql.fetchval("select pg_jit_available()"):
        pytest.skip("this Postgres compiles nothing")
    await sql.execute(
        "load 'auto_explain'; set auto_explain.log_min_duration = 0; set auto_explain.log_analyze = on;"
        " set auto_explain.log_nested_statements = on; set auto_explain.log_level = 'notice'"
    )
    sql.add_log_listener(lambda _, message: said.append(str(message)))
    for call in (
        "kafka.produce($1, 'v')",
        "kafka.produce($1, 'v', partition => 0)",
        "kafka.produce_many($1, array['v'])",
        "kafka.commit_offset('compiled', $1, 0, 1)",
        "kafka.records($1, 0)",
    ):
        await sql.execute(f"select {call}", topic)
    assert any("staged_record" in each for each in said), said
    assert [each for each in said if "JIT:" in each] == []


async def test_a_function_marked_parallel_safe_loses_nothing(sql: Connection, topic: str, consumer: Consumer) -> None:
    await sql.execute(
        f"""create function marked(n integer) returns integer language plpgsql parallel safe as
        $$ begin return kafka.produce('{topic}', n::text, partition => 0); end $$;
        create table many as select generate_series(1, 20000) n; analyze many"""
    )
    mode = "debug_parallel_query" if sql.get_server_version().major >= 16 else "force_parallel_mode"
    await sql.execute(f"set {mode} = on; set max_parallel_workers_per_gather = 2")
    with pytest.raises(asyncpg.InvalidTransactionStateError, match="parallel"):
        await sql.fetch("select marked(n) from many where n < 10")
    await sql.execute("select kafka.produce($1, 'after', partition => 0)", topic)
    assert values(read(consumer, topic, 1, none_more_s=0.1)) == [b"after"]


# --- restarts -----------------------------------------------------------------------------------------------------


async def test_records_are_there_once_although_no_gateway_ran_and_one_was_killed(
    gateway_factory: GatewayFactory,
) -> None:
    gateway = gateway_factory()
    create_topic(gateway, "t", 1)
    assert gateway.database_url is not None
    sql = await asyncpg.connect(gateway.database_url)
    produced = 0

    async def produce(count: int) -> None:
        nonlocal produced
        for _ in range(count):
            await sql.execute("select kafka.produce('t', $1)", str(produced))
            produced += 1

    for _ in range(4):
        await produce(300)
        gateway.kill()
        await produce(300)
        gateway.restart()
    await produce(1)
    await sql.close()
    consumer = Consumer({"bootstrap.servers": gateway.bootstrap, "group.id": "g"})
    try:
        assert [int(value) for value in values(read(consumer, "t", produced, partitions=1, none_more_s=0.3))] == list(
            range(produced)
        )
    finally:
        consumer.close()
