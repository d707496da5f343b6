"""The order in which the relay takes transactions whose places become visible late, and that it misses none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from storage.pool import Database
from storage.staged import FIRST_GAPS, MAX_GAPS, RETRIED_AT_ONCE, StagedRecord, StagedRecords
from storage.types import NewBatch, PartitionKey
from tests.cluster.conftest import Cluster, cluster
from tests.sql.conftest import create_topic
from tests.steps.waiting import until
from tests.storage.batches import new_batch

__all__ = ["cluster"]

SCHEMA = """
create table held (lock integer not null);
create function wait() returns trigger language plpgsql as $$
begin
    perform pg_advisory_xact_lock(new.lock);
    return null;
end
$$;
create constraint trigger wait after insert on held deferrable initially deferred for each row execute function wait();
create table counter (n integer not null);
insert into counter values (0);
"""
"""A transaction that produces and then inserts into `held` draws its place and waits for the advisory lock before it
commits."""


class Places:
    """A relay whose looks the test makes itself, and transactions that have drawn their places and do not end."""

    def __init__(self, url: str, relay: StagedRecords, sql: asyncpg.Connection, key: PartitionKey) -> None:
        self._url, self._relay, self._key = url, relay, key
        self.sql = sql
        self._open: list[asyncpg.Connection] = []

    async def connect(self) -> asyncpg.Connection:
        connection = await asyncpg.connect(self._url)
        self._open.append(connection)
        return connection

    async def produce(self, value: str) -> None:
        await self.sql.execute("select kafka.produce('t', $1, partition => 0)", value)

    async def hold(self, value: str, lock: int) -> asyncio.Task[None]:
        """Begin to commit a transaction, which also locks the counter if `lock` is 1. It waits for `release`."""
        await self.sql.execute("select pg_advisory_lock($1)", lock)
        connection = await self.connect()

        async def commit() -> None:
            async with connection.transaction():
                if lock == 1:
                    await connection.execute("update counter set n = n + 1")
                await connection.execute("select kafka.produce('t', $1, partition => 0)", value)
                await connection.execute("insert into held values ($1)", lock)

        committing = asyncio.create_task(commit())
        waits = "select exists (select from pg_stat_activity where pid = $1 and wait_event_type = 'Lock')"
        await until(lambda: self.sql.fetchval(waits, connection.get_server_pid()), f"{value} has its place")
        return committing

    async def release(self, lock: int) -> None:
        await self.sql.execute("select pg_advisory_unlock($1)", lock)

    async def look(self) -> int:
        """Look as the relay does, append nothing, and return the number of transactions."""
        return len(await self._relay.look())

    async def postpone(self) -> None:
        """Look, and postpone all transactions, as the relay does if their topic cannot be created."""
        for transaction in await self._relay.look():
            self._relay.postpone(transaction, "t")

    async def relay(self) -> list[str]:
        """Look and append once, as the relay does. Return the values."""
        values: list[str] = []

        async def build(records: list[StagedRecord]) -> list[NewBatch]:
            values.extend((record.value or b"").decode() for record in records)
            return [new_batch(self._key)]

        transactions = await self._relay.look()
        if transactions:
            await self._relay.append(transactions, build)
        return values

    async def own(self) -> None:
        assert await self._relay.try_own()

    async def close(self) -> None:
        for connection in self._open:
            await connection.close()


@pytest.fixture
async def places(cluster: Cluster, database_url: str) -> AsyncIterator[Places]:
    (node,) = cluster(1)
    create_topic(node, "t", 1)
    node.stop()
    sql = await asyncpg.connect(database_url)
    await sql.execute(SCHEMA)
    key = await sql.fetchval("select p.partition_key from sluice.partition p join sluice.topic t using (topic_id)")
    database = await Database.open(database_url)
    relay = await StagedRecords.open(database, lambda: None)
    found = Places(database_url, relay, sql, key)
    yield found
    await found.close()
    relay.close()
    await database.close()
    await sql.close()


async def draw(places: Places, count: int) -> None:
    """Draw places, as transactions do that fail afterwards."""
    await places.sql.execute("select nextval('sluice.staged_commit_seq') from generate_series(1, $1::integer)", count)


async def test_a_transaction_is_relayed_before_one_that_waited_for_it(places: Places) -> None:
    """The first transaction commits for so long that its gap is no longer among those that each look begins with."""
    await places.own()
    writer = await places.connect()  # while it writes, no gap can be forgotten
    await writer.execute("begin")
    await writer.execute("update held set lock = 1")
    await writer.execute("select pg_current_xact_id()")
    first = await places.hold("first", 1)
    await draw(places, FIRST_GAPS + 10)
    await places.produce("beside")
    assert await places.relay() == ["beside"]
    assert await places.relay() == []
    assert await places.relay() == []

    second_sql = await places.connect()

    async def second() -> None:
        async with second_sql.transaction():
            await second_sql.execute("update counter set n = n + 1")
            await second_sql.execute("select kafka.produce('t', 'second', partition => 0)")

    waiting = asyncio.create_task(second())
    await places.release(1)
    await first
    await waiting
    assert await places.relay() == ["first", "second"]
    await writer.execute("rollback")


async def test_no_look_forgets_a_transaction_that_still_commits(places: Places) -> None:
    """The later place belongs to the transaction with the lower number, and nothing else has ended since."""
    await places.own()
    await places.produce("before")
    assert await places.relay() == ["before"]
    lower = await places.connect()
    await lower.execute("begin")
    await lower.execute("select kafka.produce('t', 'lower', partition => 0)")
    higher = await places.hold("higher", 2)
    await lower.execute("commit")
    assert [await places.look() for _ in range(4)] == [1, 1, 1, 1]
    await places.release(2)
    await higher
    assert await places.relay() == ["higher", "lower"]


async def test_a_new_relay_finds_what_was_committing_when_it_began(places: Places) -> None:
    before = await places.hold("before", 2)
    await places.own()
    after = await places.hold("after", 3)
    await places.produce("beside")
    assert await places.relay() == ["beside"]
    assert await places.relay() == []
    await places.release(3)
    await after
    assert await places.relay() == ["after"]
    await places.release(2)
    await before
    assert await places.relay() == ["before"]


@pytest.mark.parametrize("count", [MAX_GAPS - 1, MAX_GAPS + 1])
async def test_a_transaction_is_found_behind_more_gaps_than_are_kept(places: Places, count: int) -> None:
    await places.own()
    first = await places.hold("first", 2)
    await draw(places, count)
    await places.produce("beside")
    assert await places.relay() == ["beside"]
    assert await places.relay() == []
    await places.release(2)
    await first
    assert await places.relay() == ["first"]


async def test_a_transaction_is_relayed_from_a_session_that_applies_the_changes_of_a_replica(places: Places) -> None:
    """In such a session, only triggers that fire always or on replicas run. One of the user may produce or commit."""
    await places.own()
    sql = await places.connect()
    async with sql.transaction():
        await sql.execute("set local session_replication_role = replica")
        await sql.execute("select kafka.produce('t', 'applied')")
        await sql.execute("select kafka.commit_offset('g', 't', 0, 7)")
    assert await places.relay() == ["applied"]
    assert await sql.fetchval("select \"offset\" from kafka.committed('g')") == 7


async def test_a_replica_of_the_staging_tables_gives_no_places(places: Places) -> None:
    await places.produce("here")
    await places.sql.execute(
        "insert into sluice.staged_record (xid, topic_id, value, timestamp_ms, arms)"
        " select xid + 1000000, topic_id, value, timestamp_ms, true from sluice.staged_record"
    )
    assert await places.sql.fetchval("select count(*) from sluice.staged_commit") == 1


async def test_a_look_of_many_large_transactions_ends_in_time(places: Places) -> None:
    """To count all of these records takes longer than a statement may, and each attempt would begin with the first one.
    Headers of an unknown size make each record as costly to count as a thousand others."""
    await places.own()
    await places.sql.execute(
        """insert into sluice.staged_record (xid, topic_id, value, headers, timestamp_ms, arms)
        select -n, t.topic_id, 'v', h.headers, 0, false
        from generate_series(1, 1500) n cross join generate_series(1, 20) cross join sluice.topic t
        cross join (select jsonb_object_agg(i, 1e100000) as headers from generate_series(1, 9) i) h
        where t.name = 't';
        insert into sluice.staged_commit (xid) select -n from generate_series(1, 1500) n"""
    )
    assert await places.look() == 1


async def test_headers_that_are_long_as_text_do_not_delay_the_look(places: Places) -> None:
    """Postgres needs more than a millisecond to write one of these headers as text, of which it stores 200 bytes."""
    await places.own()
    headers = "(select jsonb_object_agg(i, 1e100000) from generate_series(1, 9) i)"
    for _ in range(4):
        async with places.sql.transaction():
            await places.sql.execute(f"select kafka.produce('t', 'v', headers => {headers})")
            await places.sql.execute(
                """create temporary table more on commit drop as
                select r.* from sluice.staged_record r cross join generate_series(1, 10000)
                where r.xid = pg_current_xact_id()::text::bigint;
                update more set position = nextval('sluice.staged_position'), arms = false;
                insert into sluice.staged_record select * from more"""
            )
    assert await places.look() == 1


async def test_transactions_that_wait_for_a_topic_leave_room_for_others(places: Places) -> None:
    """If each look returned all of them, thousands would keep the relay from everything that was committed later."""
    await places.own()
    for _ in range(3 * RETRIED_AT_ONCE):
        await places.produce("waits")
    await places.postpone()
    assert await places.look() == 0
    found = await until(places.look, "they are due again")
    assert found == RETRIED_AT_ONCE
    await places.postpone()
    await places.produce("other")
    assert await places.look() <= RETRIED_AT_ONCE + 1


@pytest.mark.parametrize(
    "first", ["select kafka.produce_many('t', '{}'::text[])", "select produces()", "select fails()"]
)
async def test_a_transaction_has_one_place(places: Places, first: str) -> None:
    """Its first record may have been rolled back, and a function may have settings of its own."""
    await places.sql.execute(
        """create function produces() returns void language plpgsql set work_mem = '4MB' as
        $$ begin perform kafka.produce('t', 'v'); end $$;
        create function fails() returns void language plpgsql as
        $$ begin perform produces(); raise 'x'; exception when others then null; end $$"""
    )
    async with places.sql.transaction():
        await places.sql.execute(first)
        await places.sql.execute("savepoint s; select produces(); rollback to s; select produces()")
        await places.produce("v")
        await places.sql.execute("select kafka.produce_many('t', array['v'])")
    assert await places.sql.fetchval("select count(*) from sluice.staged_commit") == 1
