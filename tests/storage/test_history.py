"""A database that lacks acknowledged transactions is another history, even if little is gone and its log is long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import asyncpg
import pytest
from obstore.store import MemoryStore

from storage.byte_store import Range
from storage.check import check
from storage.errors import StorageError, StorageUnavailable
from storage.guard import Known
from storage.history import HistoryStore
from storage.log import LogStore
from storage.migrate import migrate
from storage.notify import Listener
from storage.object_store import ObjectStore
from storage.pool import Connection, Database
from storage.queries import statement
from storage.remembered import Remembered, write
from storage.roller import KEPT_MS, Roller
from storage.segment_writers import register_object
from storage.segments import SegmentDirectory
from storage.staged import StagedRecords
from storage.store import Marker, mark_history, open_store
from storage.topics import TopicStore
from storage.transactions import TransactionStore
from storage.types import Appended, NewTopic, PartitionKey, Refusal, Topic, unregistered
from tests.cluster.proxy import proxied
from tests.postgres import Databases
from tests.restorable_postgres import RestorablePostgres
from tests.storage.batches import EVERYTHING, append, new_batch, read
from tests.storage.transactions import Producer, read_committed

DEADLINE_S = 30.0

T = TypeVar("T")


class Node:
    """A node's parts that know the database, without its passes, so nothing is renewed."""

    def __init__(self, database: Database, directory: Path | None) -> None:
        self.database = database
        self.history = HistoryStore(database, directory)
        self.log = LogStore(database)

    @classmethod
    async def open(cls, url: str, directory: Path | None = None, **connections: int) -> Node:
        node = cls(await Database.open(url, **connections), directory)
        await node.history.look_back()
        await migrate(node.database)
        node.history.accept(*await node.history.adopt())
        return node

    async def topic(self, name: str = "orders") -> PartitionKey:
        (topic,) = await TopicStore(self.database).create([NewTopic(name, 1, {})])
        assert isinstance(topic, Topic)
        return topic.partitions[0].partition_key

    async def close(self) -> None:
        await self.log.close()
        await self.database.close()


async def once_reached(work: Callable[[], Awaitable[T]]) -> T:
    """Retry while the guard discovers connections that ended with a stopped server."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await work()
            except StorageUnavailable as error:
                if "another history" in str(error):
                    raise
                await asyncio.sleep(0.02)


async def grow_log(url: str) -> None:
    """Make the write-ahead log longer than it has ever been, as a server does in time, without a commit."""
    connection = await asyncpg.connect(url)
    try:
        for _ in range(2):
            await connection.execute(
                "select pg_logical_emit_message(false, 'test', repeat('x', 1000)), pg_switch_wal()"
            )
        await connection.execute("checkpoint")
    finally:
        await connection.close()


@pytest.mark.parametrize("grown", [False, True], ids=["shorter log", "longer log"])
async def test_one_lost_append_is_another_history(restorable: RestorablePostgres, *, grown: bool) -> None:
    node = await Node.open(restorable.url)
    try:
        key = await node.topic()
        await append(node.log, new_batch(key))
        restorable.save()
        assert await once_reached(lambda: append(node.log, new_batch(key))) == [1]
        restorable.put_back()
        if grown:
            await grow_log(restorable.url)
        with pytest.raises(StorageUnavailable, match="another history"):
            await once_reached(lambda: append(node.log, new_batch(key)))
        before = node.history.history
        async with asyncio.timeout(DEADLINE_S):
            await node.history.changed()
        node.history.accept(*await node.history.adopt())
        assert node.history.history > before
        assert await once_reached(lambda: append(node.log, new_batch(key))) == [1], "given a second time"
    finally:
        await node.close()


@pytest.mark.parametrize("running", [True, False], ids=["while a node runs", "while no node runs"])
async def test_a_lost_creation_of_a_topic_is_another_history(
    restorable: RestorablePostgres, tmp_path: Path, *, running: bool
) -> None:
    """The next topic would get the partition's key. Nodes that know the lost topic would append its records there."""
    node = await Node.open(restorable.url, tmp_path)
    try:
        key = await node.topic()
        await append(node.log, new_batch(key))
        restorable.save()
        await once_reached(lambda: node.topic("lost"))
        before = node.history.history
        if not running:
            await node.history.remember(3)
            await node.close()
        restorable.put_back()
        await grow_log(restorable.url)
        if running:
            with pytest.raises(StorageUnavailable, match="another history"):
                await once_reached(lambda: append(node.log, new_batch(key)))
        else:
            node = await Node.open(restorable.url, tmp_path)
            assert node.history.history > before
    finally:
        await node.close()


async def test_the_server_of_a_lost_history_acknowledges_no_append(restorable: RestorablePostgres) -> None:
    """A primary that was cut off may still run after its standby was promoted, and connections to it may be open."""
    node = await Node.open(restorable.url)
    key = await node.topic()
    await append(node.log, new_batch(key))
    await node.close()
    restorable.save()
    with restorable.promoted_copy() as promoted, proxied(restorable.url) as proxy:
        node = await Node.open(proxy.url)
        try:
            assert await append(node.log, new_batch(key)) == [1]
            proxy.move_new_connections(promoted)
            proxy.hold_open_connections()
            late = asyncio.create_task(node.log.append([new_batch(key)]))
            await proxy.held()
            node.history.accept(*await node.history.adopt())
            proxy.heal()
            with pytest.raises(StorageUnavailable, match="another history"):
                await late
            assert await append(node.log, new_batch(key)) == [1], "an append that only the former primary has"
        finally:
            await node.close()


async def test_the_relay_and_the_listener_leave_the_server_of_a_lost_history(restorable: RestorablePostgres) -> None:
    """Otherwise the relay would append on a former primary that still runs, and no record of SQL on the present one.
    The listener would hear no other node."""
    node = await Node.open(restorable.url)
    await node.close()
    restorable.save()
    with restorable.promoted_copy() as promoted, proxied(restorable.url) as proxy:
        node = await Node.open(proxy.url)
        begun, ended = asyncio.Event(), asyncio.Event()
        listening = asyncio.create_task(Listener(node.database, {}).listen(begun.set, ended.set))
        relaying = await StagedRecords.open(node.database, lambda: None)
        try:
            assert await relaying.try_own()
            await begun.wait()
            proxy.move_new_connections(promoted)
            node.history.accept(*await node.history.adopt())
            with pytest.raises(StorageUnavailable, match="another history"):
                await relaying.look()
            relaying.close()
            relaying = await StagedRecords.open(node.database, lambda: None)
            assert await relaying.try_own()
            assert await relaying.look() == []
            async with asyncio.timeout(DEADLINE_S):
                await ended.wait()
        finally:
            relaying.close()
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await node.close()


async def test_a_node_at_the_server_of_a_lost_history_removes_no_bytes(
    restorable: RestorablePostgres, tmp_path: Path
) -> None:
    """The former primary does not know the objects that other nodes have written since the failover."""
    node = await Node.open(restorable.url)
    key = await node.topic()
    await node.close()
    restorable.save()
    store = SegmentDirectory(tmp_path)
    with restorable.promoted_copy() as promoted, proxied(restorable.url) as proxy:
        former, node = await Node.open(proxy.url), await Node.open(promoted)
        log, roller = LogStore(node.database, store, inline_max_bytes=0), Roller(former.database, former.log, store)
        try:
            node.history.accept(*await node.history.adopt())
            await append(log, new_batch(key))
            proxy.move_new_connections(promoted)
            with pytest.raises(StorageUnavailable, match="another history"):
                await roller.sweep(grace_ms=0)
            assert (await read(log, key)).batches
        finally:
            await roller.close()
            await log.close()
            await former.close()
            await node.close()


@pytest.mark.parametrize("marked_by", ["the change of history", "the next pass"])
async def test_a_node_all_of_whose_connections_lead_to_a_former_primary_removes_no_bytes(
    restorable: RestorablePostgres, tmp_path: Path, marked_by: str
) -> None:
    """Such a node does not see the new history in Postgres, so the store must show it."""
    node = await Node.open(restorable.url)
    key = await node.topic()
    store = await open_store(node.database, tmp_path / "log")
    await node.close()
    restorable.save()
    with restorable.promoted_copy() as promoted:
        former, node = await Node.open(restorable.url), await Node.open(promoted)
        log = LogStore(node.database, store, inline_max_bytes=0)
        at_former, at_present = (Roller(each.database, each.log, store) for each in (former, node))
        try:
            adopted = await node.history.adopt()
            if marked_by == "the change of history":
                await at_present.begin_history(adopted[0])
            node.history.accept(*adopted)
            if marked_by == "the next pass":
                await at_present.sweep()
            await append(log, new_batch(key))
            assert await at_former.sweep(grace_ms=0) == 0
            with pytest.raises(StorageError, match="former primary"):
                await check(former.database, store, repair=True)
            assert (await read(log, key)).batches
            assert await at_present.sweep(grace_ms=0) == 0
            assert store is not None
            await store.put(2**40, [b"of the former primary"])
            assert await at_present.sweep(grace_ms=0) == 1, "in the present history bytes are removed"
        finally:
            await at_former.close()
            await at_present.close()
            await log.close()
            await former.close()
            await node.close()


async def test_a_node_at_a_former_primary_replaces_no_object_of_the_present_history(
    restorable: RestorablePostgres,
) -> None:
    """Ids that a store contains are not assigned again. A former primary that skipped the ids of the present history
    would assign the next ones, as the present primary does."""
    store_id, bucket = uuid4(), ObjectStore("s3://bucket", MemoryStore())
    await bucket.create_marker(Marker(store_id).content())
    node = await Node.open(restorable.url)
    key = await node.topic()
    await node.database.hot.fetch(statement("claim_log_store"), store_id, bucket.location)
    await node.close()
    restorable.save()
    with restorable.promoted_copy() as promoted:
        former, node = await Node.open(restorable.url), await Node.open(promoted)
        logs = [LogStore(each.database, bucket) for each in (former, node)]
        at_former, at_present = (
            Roller(each.database, log, bucket) for each, log in zip((former, node), logs, strict=True)
        )
        try:
            adopted = await node.history.adopt()
            await at_present.begin_history(adopted[0])
            node.history.accept(*adopted)
            await append(logs[1], new_batch(key, size_bytes=200, fill=1))
            assert await at_present.roll(**EVERYTHING)
            await at_former.sweep()
            await append(logs[1], new_batch(key, size_bytes=200, fill=2))
            assert await at_present.roll(**EVERYTHING)
            await append(logs[0], new_batch(key, size_bytes=200, fill=3))
            assert await at_former.roll(**EVERYTHING)
            assert [batch.records[100] for batch in (await read(logs[1], key)).batches] == [1, 2]
        finally:
            for log in logs:
                await log.close()
            for each in (former, node):
                await each.close()
            bucket.close()


async def test_a_read_that_spans_two_histories_has_no_result(database_url: str, tmp_path: Path) -> None:
    node = await Node.open(database_url)
    guard = node.database.guard

    class Slow(SegmentDirectory):
        async def load(self, object_id: int, ranges: Sequence[Range], look: Callable[[list[bytearray]], T]) -> T:
            guard.accept(guard.history + 1, "another", 0)
            return await super().load(object_id, ranges, look)

    log = LogStore(node.database, Slow(tmp_path), inline_max_bytes=0)
    try:
        key = await node.topic()
        await append(log, new_batch(key))
        with pytest.raises(StorageUnavailable, match="another history"):
            await read(log, key)
    finally:
        await log.close()
        await node.close()


async def test_a_call_that_waited_for_a_connection_runs_in_the_new_history(postgres: Databases) -> None:
    url = postgres.create()
    node = await Node.open(url, hot_connections=1)
    held, release = asyncio.Event(), asyncio.Event()

    async def hold(connection: Connection) -> None:
        held.set()
        await release.wait()
        await connection.execute("select 1")

    try:
        holder = asyncio.create_task(node.database.hot.run(hold))
        await held.wait()
        waiter = asyncio.create_task(node.database.hot.fetch_value("select 2"))
        node.history.accept(*await node.history.adopt())
        assert not waiter.done()
        release.set()
        with pytest.raises(StorageUnavailable, match="another history"):
            await holder
        assert await waiter == 2
    finally:
        await node.close()
        postgres.drop(url)


async def test_ids_that_a_lost_history_gave_out_are_not_given_out_again(restorable: RestorablePostgres) -> None:
    """A batch that waited while Postgres was away would go to another topic, and an upload would replace another
    object."""
    node = await Node.open(restorable.url)
    try:
        restorable.save()
        lost = await once_reached(node.topic)
        await append(node.log, new_batch(lost))
        lost_object = await register_object(node.database.hot, unregistered)
        restorable.put_back()
        with pytest.raises(StorageUnavailable, match="another history"):
            await once_reached(lambda: node.log.append([new_batch(lost)]))
        node.history.accept(*await node.history.adopt())
        key = await once_reached(node.topic)
        assert await node.log.append([new_batch(lost), new_batch(key)]) == [
            Refusal.UNKNOWN_PARTITION,
            Appended(0, 0, 0, False),
        ]
        assert await register_object(node.database.hot, unregistered) != lost_object
    finally:
        await node.close()


async def test_a_restart_that_lost_nothing_is_the_same_history(restorable: RestorablePostgres) -> None:
    node = await Node.open(restorable.url)
    try:
        key = await node.topic()
        for offset in range(5):
            assert await once_reached(lambda: append(node.log, new_batch(key))) == [offset]
            restorable.stop()
            restorable.start()
        assert not node.database.guard.broken.is_set()
    finally:
        await node.close()


async def test_a_transaction_too_old_for_postgres_to_know_is_no_loss(restorable: RestorablePostgres) -> None:
    """Postgres forgets the outcome of old transactions once every row records it."""
    node = await Node.open(restorable.url)
    try:
        await append(node.log, new_batch(await node.topic()))
        node.database.guard.acknowledged(node.history.history, 3, 0)  # A transaction of initdb.
        restorable.stop()
        restorable.start()
        await once_reached(lambda: node.database.hot.fetch("select 1"))
    finally:
        await node.close()


# --- from one run to the next ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("grown", [False, True], ids=["shorter log", "longer log"])
async def test_a_database_restored_while_no_node_ran_is_another_history(
    restorable: RestorablePostgres, tmp_path: Path, *, lost: bool, grown: bool
) -> None:
    node = await Node.open(restorable.url, tmp_path)
    key = await node.topic()
    await append(node.log, new_batch(key))
    await node.history.remember(3)
    restorable.save()
    if lost:
        await once_reached(lambda: append(node.log, new_batch(key)))
        await node.history.remember(3)
    before = node.history.history
    await node.close()
    restorable.put_back()
    if grown:
        await grow_log(restorable.url)
    for expected in (before + lost, before + lost):
        node = await Node.open(restorable.url, tmp_path)
        assert node.history.history == expected
        await node.close()


async def test_a_copy_restored_twice_begins_a_later_history_each_time(
    restorable: RestorablePostgres, tmp_path: Path
) -> None:
    """The second time, the copy does not know the history that began after the first. Clients know its epochs, and
    producers of transactions have learned theirs there."""
    node = await Node.open(restorable.url)
    key = await node.topic()
    producer = Producer(node.database, node.log, 4000)
    await producer.append(key, (None, b"1"))
    await producer.end(committed=True)
    await node.close()
    epochs: list[int] = []
    producer_epochs: list[int] = []
    for _ in range(3):
        restorable.save()
        node = await Node.open(restorable.url, tmp_path)
        (appended,) = await node.log.append([new_batch(key)])
        assert isinstance(appended, Appended)
        epochs.append(appended.leader_epoch)
        row = await TransactionStore(node.database).read(producer.transactional_id)
        assert row.record is not None
        producer_epochs.append(row.record.producer_epoch)
        await node.history.remember(3)
        await node.close()
        restorable.put_back()
    assert epochs == sorted(set(epochs)), "clients that have seen an epoch refuse an earlier one"
    assert producer_epochs == sorted(set(producer_epochs)), "a producer is fenced each time"


async def test_a_database_from_a_base_backup_begins_a_later_history_than_its_store_names(
    postgres: Databases, tmp_path: Path
) -> None:
    """Another recovery from the same base backup has begun a history before, on a timeline of its own. Clients know the
    epochs of that history."""
    url = postgres.create()
    node = await Node.open(url)
    sql = await asyncpg.connect(url)
    place = tmp_path / "log"
    try:
        store = await open_store(node.database, place)
        assert store is not None
        await mark_history(store, 5)
        await sql.execute("update sluice.cluster set history_identity = 'of the base backup'")
        for _ in range(2):
            history, *_ = await HistoryStore(node.database, place).adopt()
            assert history == 6
    finally:
        await sql.close()
        await node.close()
        postgres.drop(url)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"identity": "x", "history": "y", "flushed_lsn": 0, "transactions": 3}']
)
async def test_a_damaged_record_or_one_of_another_database_is_ignored(
    restorable: RestorablePostgres, tmp_path: Path, text: str
) -> None:
    node = await Node.open(restorable.url, tmp_path)
    before, identity = node.history.history, node.database.guard.identity
    await node.close()
    (tmp_path / "sluice-history-1.json").write_text(text)
    assert identity is not None
    write(tmp_path, 2, Remembered(f"another/{identity}", Known(before, 2**60, (2**40,))))
    write(tmp_path, 3, Remembered(identity, Known(before - 1, 2**60, (2**40,))))
    node = await Node.open(restorable.url, tmp_path)
    assert node.history.history == before
    await node.close()


async def test_a_directory_that_cannot_be_written_is_reported(restorable: RestorablePostgres, tmp_path: Path) -> None:
    node = await Node.open(restorable.url, tmp_path / "not there")
    with pytest.raises(StorageError, match="cannot write"):
        await node.history.remember(1)
    await node.close()


async def test_another_history_fences_transactional_producers(database_url: str) -> None:
    """A fenced producer's transaction may be gone, or may have ended. A later owner may have received its next
    epoch."""
    node = await Node.open(database_url)
    sql = await asyncpg.connect(database_url)
    try:
        key = await node.topic()
        transactions = TransactionStore(node.database)
        idle, open_one = Producer(node.database, node.log, 4000), Producer(node.database, node.log, 4001)
        await idle.append(key, (None, b"1"))
        await idle.end(committed=True)
        await open_one.append(key, (None, b"2"))
        assert await transactions.overdue(10) == []
        before = {each.transactional_id: await transactions.read(each.transactional_id) for each in (idle, open_one)}

        await sql.execute("set search_path = sluice")
        schema = await sql.fetchval("select nspname from pg_namespace where nspname ~ '^sluice_[0-9a-f]{12}$'")
        await sql.execute(f"select {schema}.adopt_history('another', -1)")
        for name, read in before.items():
            now = await transactions.read(name)
            assert read.record is not None
            assert now.record is not None
            assert now.record.producer_epoch == read.record.producer_epoch + 1000
            assert now.record.last_producer_epoch == read.record.producer_epoch, "its owner may continue"
            assert now.record.state == ("Ongoing" if name == open_one.transactional_id else "CompleteAbort")
            assert (now.last_started_ms is None) == (name == open_one.transactional_id)
            assert not await transactions.save(read, read.record), "who had read it before decides anew"
            assert not await transactions.add(read, [key])
        assert [each.transactional_id for each in await transactions.overdue(10)] == [open_one.transactional_id]
        await open_one.end(committed=False)
        records, _ = await read_committed(node.log, key)
        assert [record.value for record in records] == [b"1"]
    finally:
        await sql.close()
        await node.close()


async def test_a_producer_that_was_idle_during_two_losses_of_commits_may_continue(database_url: str) -> None:
    node = await Node.open(database_url)
    sql = await asyncpg.connect(database_url)
    try:
        key = await node.topic()
        transactions = TransactionStore(node.database)
        idle, open_one = Producer(node.database, node.log, 4000), Producer(node.database, node.log, 4001)
        await idle.append(key, (None, b"1"))
        await idle.end(committed=True)
        await open_one.append(key, (None, b"2"))
        before = {each.transactional_id: await transactions.read(each.transactional_id) for each in (idle, open_one)}

        await sql.execute("set search_path = sluice")
        schema = await sql.fetchval("select nspname from pg_namespace where nspname ~ '^sluice_[0-9a-f]{12}$'")
        for number in (1, 2):
            await sql.execute(f"select {schema}.adopt_history('another {number}', -1)")
        for name, read in before.items():
            now = await transactions.read(name)
            assert read.record is not None
            assert now.record is not None
            assert now.record.producer_epoch == read.record.producer_epoch + 2_000
            assert now.record.last_producer_epoch == read.record.producer_epoch
    finally:
        await sql.close()
        await node.close()


async def test_another_history_begins_with_transactions_of_the_longest_timeout(database_url: str) -> None:
    """`transaction.max.timeout.ms` may be the greatest integer."""
    node = await Node.open(database_url)
    sql = await asyncpg.connect(database_url)
    try:
        key = await node.topic()
        idle, open_one = Producer(node.database, node.log, 4000), Producer(node.database, node.log, 4001)
        await idle.append(key, (None, b"1"))
        await idle.end(committed=True)
        await open_one.append(key, (None, b"2"))
        await sql.execute("set search_path = sluice")
        await sql.execute("update transactional_producer set timeout_ms = 2147483647")
        schema = await sql.fetchval("select nspname from pg_namespace where nspname ~ '^sluice_[0-9a-f]{12}$'")
        await sql.execute(f"select {schema}.adopt_history('another', -1)")
        overdue = await TransactionStore(node.database).overdue(10)
        assert [each.transactional_id for each in overdue] == [open_one.transactional_id]
    finally:
        await sql.close()
        await node.close()


async def test_producer_ids_stay_unique_if_the_same_copy_is_restored_twice(database_url: str) -> None:
    node = await Node.open(database_url)
    sql = await asyncpg.connect(database_url)
    try:
        await sql.execute("set search_path = sluice")
        schema = await sql.fetchval("select nspname from pg_namespace where nspname ~ '^sluice_[0-9a-f]{12}$'")
        given: list[int] = []
        for _ in range(2):
            restored = sql.transaction()
            await restored.start()
            await sql.execute(f"select {schema}.adopt_history('another', -1)")
            given.append(await sql.fetchval("select next_producer_id from cluster"))
            await restored.rollback()
        assert given[1] > given[0]
    finally:
        await sql.close()
        await node.close()


async def test_a_segment_is_not_trimmed_to_an_end_that_was_counted_in_a_lost_history(
    postgres: Databases, tmp_path: Path
) -> None:
    """In the lost history, its last chunk had moved elsewhere."""
    url = postgres.create()
    node = await Node.open(url)
    sql = await asyncpg.connect(url, server_settings={"search_path": "sluice"})
    now = 0.0
    store = SegmentDirectory(tmp_path, segment_bytes=256 * 1024)
    log = LogStore(node.database, store, inline_max_bytes=0)
    roller = Roller(node.database, log, store, monotonic=lambda: now)
    try:
        key = await node.topic()
        for size_bytes in (30_000, 20_000):
            await append(log, new_batch(key, size_bytes=size_bytes))
        await sql.execute("update log_object set sealed_at = clock_timestamp() - interval '1 hour'")
        await sql.execute("create temporary table moved as select * from chunk where base_offset = 1")
        await sql.execute("delete from chunk where base_offset = 1")
        await roller.sweep()
        await sql.execute("insert into chunk select * from moved")
        await sql.execute("update cluster set history_identity = 'lost'")
        node.history.accept(*await node.history.adopt())
        now = KEPT_MS / 1000
        await roller.sweep()
        assert len((await read(log, key)).batches) == 2
    finally:
        await sql.close()
        await roller.close()
        await log.close()
        await node.close()
        postgres.drop(url)
