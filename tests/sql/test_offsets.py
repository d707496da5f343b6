"""kafka.commit_offset inside transactions of SQL clients, beside stock consumers of the group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import asyncpg
import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.gateway_process import GatewayProcess
from tests.sql.offsets import COMMIT, Connection, fence
from tests.sql.reading import error
from tests.steps.command import output_of
from tests.steps.waiting import until

DEADLINE_S = 60


@pytest.fixture
def join(gateway: GatewayProcess) -> Iterator[Callable[..., Consumer]]:
    """Make a stock consumer join a group. Wait until all consumers of the test own some of the three partitions."""
    made: list[Consumer] = []

    def start(group: str, topic: str, protocol: str = "classic") -> Consumer:
        settings: dict[str, Any] = {
            "bootstrap.servers": gateway.bootstrap,
            "group.id": group,
            **({"group.protocol": protocol} if protocol == "consumer" else {"heartbeat.interval.ms": 500}),
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
        consumer = Consumer(settings)
        made.append(consumer)
        consumer.subscribe([topic])
        poll_until(made, lambda: shared(made))
        return consumer

    yield start
    for consumer in made:
        consumer.close()


def shared(consumers: list[Consumer]) -> bool:
    """Return True if each consumer owns some partitions and they own all three together."""
    owned = [len(consumer.assignment()) for consumer in consumers]
    return all(owned) and sum(owned) == 3


def poll_until(consumers: list[Consumer], met: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not met():
        assert time.monotonic() < deadline_s
        for consumer in consumers:
            consumer.poll(0.1)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_results_and_position_are_committed_together(
    sql: Connection, topic: str, join: Callable[..., Consumer], protocol: str
) -> None:
    group = f"billing-{protocol}"
    consumer = join(group, topic, protocol)
    member_id = consumer.memberid()
    generation = await fence(sql, group, member_id)
    await sql.execute("create table if not exists totals (n integer)")
    async with sql.transaction():
        await sql.execute("insert into totals values (1)")
        await sql.execute(COMMIT, group, topic, 0, 4712, generation, member_id)
    (committed,) = consumer.committed([TopicPartition(topic, 0)], timeout=10)
    assert committed.offset == 4712
    rows = await sql.fetch('select topic, partition, "offset", metadata from kafka.committed($1)', group)
    assert [tuple(row) for row in rows] == [(topic, 0, 4712, "")]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_fenced_commits_fail_the_transaction(
    sql: Connection, topic: str, join: Callable[..., Consumer], protocol: str
) -> None:
    group = f"fenced-{protocol}"
    consumer = join(group, topic, protocol)
    member_id = consumer.memberid()
    generation = await fence(sql, group, member_id)
    for named in (
        (generation - 1, member_id),
        (generation + 1, member_id),
        (generation, "nobody"),
        (generation, None),
        (None, member_id),
        (None, None),
    ):
        with pytest.raises(asyncpg.PostgresError) as refused:
            await sql.execute(COMMIT, group, topic, 0, 1, *named)
        assert error(refused).sqlstate == "SL001", refused.value
        assert group in str(refused.value)
        assert topic in str(refused.value)
    assert await sql.fetch("select * from kafka.committed($1)", group) == []


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize(
    ("isolation", "early", "sqlstate"),
    [
        ("read committed", "", "SL001"),
        ("read committed", "set constraints all immediate", "SL001"),
        ("read committed", "do $$ begin for i in 1..2 loop set constraints all immediate; end loop; end $$", "SL001"),
        ("read committed", "set constraints all immediate; set/**/constraints all immediate", "SL001"),
        # The snapshot shows the former generation, so Postgres itself refuses to lock the group's row.
        ("repeatable read", "", "40001"),
        ("serializable", "", "40001"),
    ],
)
async def test_a_rebalance_after_the_call_fences_the_commit(
    sql: Connection,
    topic: str,
    join: Callable[..., Consumer],
    protocol: str,
    isolation: str,
    early: str,
    sqlstate: str,
) -> None:
    group = f"rebalanced-{protocol}-{isolation}-{len(early)}"
    first = join(group, topic, protocol)
    member_id = first.memberid()
    generation = await fence(sql, group, member_id)
    await sql.execute("create table if not exists totals (n integer); truncate totals")
    await sql.execute(f"begin isolation level {isolation}")
    await sql.execute("insert into totals values (1)")
    await sql.execute(COMMIT, group, topic, 0, 7, generation, member_id)
    if early:
        await sql.execute(early)
    # The open transaction holds no lock that a rebalance waits for.
    join(group, topic, protocol)
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.execute("commit")
    assert error(refused).sqlstate == sqlstate
    assert await sql.fetchval("select count(*) from totals") == 0
    assert await sql.fetch("select * from kafka.committed($1)", group) == []


async def test_a_rebalance_waits_for_no_other_deferred_trigger_of_a_commit(
    sql: Connection, other: Connection, topic: str, join: Callable[..., Consumer]
) -> None:
    """The check of a deferred foreign key waits for each transaction that has locked the referenced row."""
    group = "deferred"
    member_id = join(group, topic).memberid()
    generation = await fence(sql, group, member_id)
    await sql.execute(
        """create table referenced (id integer primary key); insert into referenced values (1);
        create table referring (id integer references referenced deferrable initially deferred)"""
    )
    await other.execute("begin")
    await other.execute("select from referenced where id = 1 for update")
    await sql.execute("begin")
    await sql.execute(COMMIT, group, topic, 0, 7, generation, member_id)
    await sql.execute("insert into referring values (1)")
    committing = asyncio.create_task(sql.execute("commit"))
    waits = "select exists (select from pg_stat_activity where pid = $1 and wait_event_type = 'Lock')"
    await until(lambda: other.fetchval(waits, sql.get_server_pid()), "the commit waits")
    join(group, topic)
    await other.execute("rollback")
    with pytest.raises(asyncpg.PostgresError, match="fenced"):
        await committing


@pytest.mark.parametrize(("isolation", "sqlstate"), [("read committed", None), ("repeatable read", "40001")])
async def test_a_commit_that_waits_for_the_removal_of_its_group_begins_the_group_anew(
    gateway: GatewayProcess, sql: Connection, topic: str, isolation: str, sqlstate: str | None
) -> None:
    group = f"removed-{isolation}"
    await sql.execute(COMMIT, group, topic, 0, 1, None, None)
    assert gateway.database_url is not None
    removing, looking = await asyncpg.connect(gateway.database_url), await asyncpg.connect(gateway.database_url)
    removal = removing.transaction()
    await removal.start()
    await removing.execute("delete from sluice.committed_offset where group_id = $1", group)
    await removing.execute("delete from sluice.consumer_group where group_id = $1", group)

    async def commit() -> None:
        async with sql.transaction(isolation=isolation.replace(" ", "_")):
            await sql.execute(COMMIT, group, topic, 0, 2, None, None)

    committing = asyncio.create_task(commit())
    waits = "select exists (select from pg_stat_activity where pid = $1 and wait_event_type = 'Lock')"
    await until(lambda: looking.fetchval(waits, sql.get_server_pid()), "the commit waits")
    await removal.commit()
    if sqlstate is None:
        await committing
    else:
        with pytest.raises(asyncpg.PostgresError) as refused:
            await committing
        assert error(refused).sqlstate == sqlstate
    offsets = await sql.fetch('select "offset" from kafka.committed($1)', group)
    assert [row["offset"] for row in offsets] == ([2] if sqlstate is None else [])
    await removing.close()
    await looking.close()


async def test_a_group_without_members_commits_without_a_fence(
    sql: Connection, topic: str, gateway: GatewayProcess
) -> None:
    await sql.execute("select kafka.commit_offset('simple', $1, 1, 5, 'note')", topic)
    async with sql.transaction():
        for offset in (9, 6):
            await sql.execute("select kafka.commit_offset('simple', $1, 1, $2)", topic, offset)
        await sql.execute("savepoint s")
        await sql.execute("select kafka.commit_offset('simple', $1, 1, 7)", topic)
        await sql.execute("select kafka.commit_offset('simple', $1, 2, 8)", topic)
        await sql.execute("rollback to savepoint s")
    rows = await sql.fetch("select partition, \"offset\" from kafka.committed('simple')")
    assert [tuple(row) for row in rows] == [(1, 6)]
    consumer = Consumer({"bootstrap.servers": gateway.bootstrap, "group.id": "simple"})
    (committed,) = consumer.committed([TopicPartition(topic, 1)], timeout=10)
    assert committed.offset == 6
    consumer.close()


@pytest.mark.parametrize(
    ("arguments", "sqlstate", "text"),
    [
        ("null, '{topic}', 0, 1", "22004", "must not be NULL"),
        ("'g', null, 0, 1", "22004", "must not be NULL"),
        ("'g', '{topic}', null, 1", "22004", "must not be NULL"),
        ("'g', '{topic}', 0, null", "22004", "must not be NULL"),
        ("'', '{topic}', 0, 1", "22023", "1 to 1024 bytes"),
        ("repeat('g', 1025), '{topic}', 0, 1", "22023", "1 to 1024 bytes"),
        ("'g', '{topic}', 0, -1", "22023", "must not be negative"),
        ("'g', '{topic}', 0, 1, repeat('m', 4097)", "22023", "must not exceed 4096 bytes"),
        ("'g', '{topic}', -1, 1", "42704", "does not exist"),
        ("'g', '{topic}', 3, 1", "42704", "does not exist"),
        ("'g', 'absent', 0, 1", "42704", "absent-0 does not exist"),
    ],
)
async def test_bad_input_of_a_commit_is_refused(
    sql: Connection, topic: str, arguments: str, sqlstate: str, text: str
) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.execute(f"select kafka.commit_offset({arguments})".replace("{topic}", topic))
    assert error(refused).sqlstate == sqlstate
    assert text in str(refused.value)
    assert error(refused).hint


async def test_the_journal_shows_who_committed_by_sql(
    sql: Connection, topic: str, join: Callable[..., Consumer]
) -> None:
    consumer = join("journaled", topic)
    member_id = consumer.memberid()
    generation = await fence(sql, "journaled", member_id)
    async with sql.transaction():
        await sql.execute(COMMIT, "journaled", topic, 0, 3, generation, member_id)
        await sql.execute(COMMIT, "journaled", topic, 1, 4, generation, member_id)
    with pytest.raises(asyncpg.PostgresError, match="fenced"):
        await sql.execute(COMMIT, "journaled", topic, 0, 9, generation - 1, member_id)
    await sql.execute("begin")
    await sql.execute(COMMIT, "journaled", topic, 0, 8, generation, member_id)
    await sql.execute("rollback")
    await sql.execute("select kafka.commit_offset('unfenced', $1, 2, 5)", topic)
    deadline_s = time.monotonic() + DEADLINE_S
    while await sql.fetchval("select exists (select from sluice.staged_offset)"):
        assert time.monotonic() < deadline_s
        consumer.poll(0.1)
    role: Any = await sql.fetchval("select session_user")
    rows = await sql.fetch(
        """select group_id, generation_id, member_id, topic, partition, "offset", error_code, sql_role, log_end_offset
        from sluice.journal_offset where kind = 'commit' and topic = $1 and error_code = 0 order by seq""",
        topic,
    )
    assert [tuple(row) for row in rows] == [
        ("journaled", generation, member_id, topic, 0, 3, 0, role, 0),
        ("journaled", generation, member_id, topic, 1, 4, 0, role, 0),
        ("unfenced", -1, None, topic, 2, 5, 0, role, 0),
    ]


async def journaled_refusals(sql: Connection, topic: str) -> list[Any]:
    """Return the journal's refused commits to the topic, after the journal has all earlier events."""
    await until(
        lambda: sql.fetchval(
            "select d.refusals_journaled = (select q.last_value from sluice.refused_commit q) from sluice.sql_door d"
        ),
        "a node moves refused commits to the journal",
    )
    rows = await sql.fetch(
        """select generation_id, member_id, partition, "offset", error_code, sql_role, commit_count
        from sluice.journal_offset where kind = 'commit' and topic = $1 and error_code <> 0 order by seq""",
        topic,
    )
    return [tuple(row) for row in rows]


async def test_the_journal_shows_fenced_commits_of_sql(
    sql: Connection, topic: str, join: Callable[..., Consumer], gateway: GatewayProcess
) -> None:
    role: Any = await sql.fetchval("select session_user")
    consumer = join("fenced", topic)
    member_id = consumer.memberid()
    generation = await fence(sql, "fenced", member_id)
    for named, offset in ((generation - 1, 7), (generation, 2**40)):
        member = member_id if named < generation else "nobody"
        with pytest.raises(asyncpg.PostgresError, match="fenced"):
            await sql.execute(COMMIT, "fenced", topic, 1, offset, named, member)
    await sql.execute("begin")
    await sql.execute(COMMIT, "fenced", topic, 2, 9, generation, member_id)
    consumer.close()  # between the call and the commit the group's generation ends
    with pytest.raises(asyncpg.PostgresError, match="fenced"):
        await sql.execute("commit")
    assert await journaled_refusals(sql, topic) == [
        (generation - 1, member_id, 1, 7, 22, role, 1),
        (generation, None, 1, 2**40, 25, role, 1),
        (generation, member_id, 2, 9, 25, role, 1),
    ]
    assert await sql.fetch("select * from kafka.committed('fenced')") == []
    assert gateway.database_url is not None
    shown = await asyncio.to_thread(output_of, "groups", "history", "fenced", "--database-url", gateway.database_url)
    assert f"commit of {member_id} by SQL role {role} refused, ILLEGAL_GENERATION: {topic}[1] to 7" in shown


async def test_fenced_commits_beyond_the_ring_are_counted(
    sql: Connection, topic: str, join: Callable[..., Consumer]
) -> None:
    consumer = join("often-fenced", topic)
    total = 200
    for number in range(total):
        with pytest.raises(asyncpg.PostgresError, match="fenced"):
            await sql.execute(COMMIT, "often-fenced", topic, 0, number, 0, "nobody")
    found = await journaled_refusals(sql, topic)
    assert sum(row[-1] for row in found) == total
    assert found[-1][3] == total - 1
    consumer.close()
