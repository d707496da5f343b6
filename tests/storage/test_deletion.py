"""Deletion in two phases. A topic is hidden at once, however much it holds. Any node then removes it in bounded
steps."""

from __future__ import annotations

import asyncpg
import pytest

from storage.deletion import DeletionStore, Steps
from storage.errors import StorageConflict, StorageError, StorageUnavailable
from storage.groups import GroupStore
from storage.log import LogStore
from storage.monitor import Monitor
from storage.nodes import NodeStore
from storage.offsets import OffsetStore
from storage.pool import Database
from storage.queries import statement
from storage.topics import TopicStore
from storage.types import CoordinatorLease, LeaseKind, OffsetCommit, Refusal, Topic
from tests.storage.batches import append, append_each, new_batch, offsets, read
from tests.storage.conftest import LATER_REVISION, MakeTopic
from tests.storage.pages import ABORTED, fill_unknown, pages_touched

TABLES = (
    *("topic", "partition", "chunk", "producer_state", "compaction_state", "committed_offset"),
    *("open_transaction", "aborted_transaction"),
)
GROUP = (
    "insert into consumer_group (group_id, shard, group_type, state, state_timestamp_ms, generation_id, document) "
    "values ('g', 0, 'classic', 'Empty', 0, 0, '{}')"
)
COMMIT = "insert into committed_offset values ('g', $1, $2, 1, -1, '', 0)"
DELETION = 2


@pytest.fixture
def deletions(database: Database) -> DeletionStore:
    return DeletionStore(database)


@pytest.fixture
async def lease(database: Database) -> CoordinatorLease:
    """The lease that a node needs for the job."""
    nodes = NodeStore(database)
    node_id = await nodes.register("localhost:9092", {"PLAINTEXT": ("localhost", 9092)}, None, 60_000)
    await nodes.renew(node_id, 60_000, catalog_revision=LATER_REVISION)
    (lease,) = await nodes.acquire_leases(node_id, [DELETION], 60_000, LeaseKind.JOBS)
    return lease


async def rows(sql: asyncpg.Connection) -> dict[str, int]:
    return {table: await sql.fetchval(f"select count(*) from {table}") or 0 for table in TABLES}


async def delete(deletions: DeletionStore, topic: Topic) -> int:
    """Run turns of the deletion until the topic is gone, and return their number."""
    for turn in range(1, 1_000):
        if (await deletions.advance(topic.topic_id)).gone:
            return turn
    raise AssertionError("the deletion comes to no end")


# --- the first phase --------------------------------------------------------------------------------------------------


async def test_a_deleted_topic_is_closed_before_any_of_its_rows_is_touched(
    database: Database, log: LogStore, topics: TopicStore, make_topic: MakeTopic, leases: list[CoordinatorLease]
) -> None:
    topic = await make_topic("orders", 3)
    key = topic.partitions[0].partition_key
    await append(log, new_batch(key))
    assert await topics.delete(topic.topic_id)
    assert await log.append([new_batch(key)]) == [Refusal.UNKNOWN_PARTITION]
    assert await log.states([key]) == {}
    assert await log.delete_records(key, -1) is Refusal.UNKNOWN_PARTITION
    commit = OffsetCommit(leases[0], "g", -1, topic.topic_id, 0, 1, -1, "")
    assert await OffsetStore(database).commit([commit]) == [Refusal.UNKNOWN_TOPIC]
    assert await topics.find("orders") is None
    assert await make_topic("orders") != topic


async def test_hiding_a_topic_waits_for_no_lock_and_costs_the_same_for_any_size(
    topics: TopicStore, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    small, large = await make_topic("small", 1), await make_topic("large", 500)
    await sql.execute(GROUP)
    await sql.executemany(COMMIT, [(large.topic_id, index) for index in range(500)])
    cost = [await pages_touched(sql, statement("delete_topic"), topic.topic_id) for topic in (small, large)]
    assert abs(cost[0] - cost[1]) <= 3, cost
    async with sql.transaction():
        await sql.execute("select from partition where topic_id = $1 for update", large.topic_id)
        await sql.execute("select from committed_offset where topic_id = $1 for update", large.topic_id)
        assert await topics.delete(large.topic_id), "an append or a commit that hangs holds up no deletion"


# --- the second phase -------------------------------------------------------------------------------------------------


async def test_every_row_of_a_deleted_topic_is_removed_and_no_other(
    database: Database, log: LogStore, topics: TopicStore, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    deletions = DeletionStore(database, Steps(statements=5, partitions=2, chunks=2, producers=1, offsets=1))
    kept_topic, gone = await make_topic("kept", 2), await make_topic("gone", 5)
    await sql.execute(GROUP)
    for topic in (kept_topic, gone):
        for partition in topic.partitions:
            await append_each(log, *(new_batch(partition.partition_key, producer=(1, 0, i)) for i in range(5)))
            await sql.execute("insert into compaction_state (partition_key) values ($1)", partition.partition_key)
            await sql.execute(COMMIT, topic.topic_id, partition.partition_index)
            await sql.execute("insert into open_transaction values ($1, 1, 0, 0)", partition.partition_key)
            await sql.execute(ABORTED, partition.partition_key, 3)
    await topics.delete(gone.topic_id)
    assert [(each.name, each.failures) for each in await deletions.due(10)] == [("gone", 0)]
    (pending,) = await deletions.pending(10)
    assert (pending.name, pending.partitions_left, pending.error) == ("gone", 5, None)

    first = await deletions.advance(gone.topic_id)
    assert not first.gone
    assert (await rows(sql))["chunk"] > 10, "a turn is bounded"
    assert await delete(deletions, gone) > 3
    assert await rows(sql) == {
        "topic": 1,
        "partition": 2,
        "chunk": 10,
        "producer_state": 2,
        "compaction_state": 2,
        "committed_offset": 2,
        "open_transaction": 2,
        "aborted_transaction": 6,
    }
    assert offsets((await read(log, kept_topic.partitions[0].partition_key)).batches) == [(i, i) for i in range(5)]
    assert await deletions.due(10) == await deletions.pending(10) == []
    assert (await deletions.advance(gone.topic_id)).gone, "again, by whoever did not hear of it"


async def test_another_store_continues_where_the_first_was_interrupted(
    database: Database, log: LogStore, topics: TopicStore, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    deletions = DeletionStore(database, Steps(statements=1))
    gone = await make_topic("gone", 3)
    for partition in gone.partitions:
        await append_each(log, *(new_batch(partition.partition_key) for _ in range(3)))
    await topics.delete(gone.topic_id)
    for _ in range(3):
        assert not (await deletions.advance(gone.topic_id)).gone
    await delete(DeletionStore(database), gone)
    assert await rows(sql) == dict.fromkeys(TABLES, 0)


async def test_a_locked_partition_delays_the_deletion_ever_longer_while_the_name_is_free(
    database: Database, deletions: DeletionStore, log: LogStore, topics: TopicStore, make_topic: MakeTopic,
    sql: asyncpg.Connection, lease: CoordinatorLease,
) -> None:  # fmt: skip
    gone, other = await make_topic("gone", 2), await make_topic("other")
    for partition in gone.partitions:
        await append(log, new_batch(partition.partition_key))
    for topic in (gone, other):
        await topics.delete(topic.topic_id)
    waits: list[int] = []
    async with sql.transaction():
        await sql.execute("select from partition where partition_key = $1 for update", gone.partitions[1].partition_key)
        with pytest.raises(StorageUnavailable, match="lock timeout"):
            await delete(deletions, gone)
        for _ in range(8):
            put_off = await deletions.failed(gone.topic_id, "lock timeout", lease)
            assert put_off is not None
            waits.append(round(put_off[1] / 1000))
        assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
        assert [each.name for each in await deletions.due(10)] == ["other"], "it keeps no other from its turn"
        await delete(deletions, other)
        again = await make_topic("gone")
        await append(log, new_batch(again.partitions[0].partition_key))
        (seen,) = await deletions.pending(10)
        assert (seen.name, seen.failures, seen.error) == ("gone", 8, "lock timeout")
        assert 58_000 < (seen.retry_in_ms or 0) <= 60_000
        totals = await Monitor(database).deletions()
        assert (totals.pending, totals.failing) == (1, 1)
        assert totals.oldest_s > 0
    await sql.execute("update topic set delete_retry_at = now() where topic_id = $1", gone.topic_id)
    assert [each.failures for each in await deletions.due(10)] == [8]
    await delete(deletions, gone)
    assert (await rows(sql))["topic"] == 1
    assert offsets((await read(log, again.partitions[0].partition_key)).batches) == [(0, 0)]


async def test_only_the_owner_of_the_job_delays_a_topic(
    deletions: DeletionStore, topics: TopicStore, make_topic: MakeTopic, lease: CoordinatorLease
) -> None:
    gone = await make_topic("gone")
    await topics.delete(gone.topic_id)
    stale = CoordinatorLease(lease.shard, lease.node_id, lease.lease_epoch - 1, LeaseKind.JOBS)
    assert await deletions.failed(gone.topic_id, "late", stale) is None
    assert [each.failures for each in await deletions.due(10)] == [0]


async def test_deletion_waits_for_a_running_commit_that_refers_to_the_topic(
    deletions: DeletionStore, topics: TopicStore, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    gone = await make_topic("gone")
    await sql.execute(GROUP)
    await topics.delete(gone.topic_id)
    async with sql.transaction():
        await sql.execute(COMMIT, gone.topic_id, 0)
        with pytest.raises(StorageConflict, match="a running commit"):
            await delete(deletions, gone)
        assert (await rows(sql))["topic"] == 1
    await delete(deletions, gone)
    assert await rows(sql) == dict.fromkeys(TABLES, 0)


async def test_a_cleaning_that_begins_during_the_deletion_leaves_no_row(
    database: Database, deletions: DeletionStore, topics: TopicStore, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    gone = await make_topic("gone")
    async with sql.transaction():
        assert await sql.fetchval(statement("begin_compaction"), gone.partitions[0].partition_key) == 1
        await topics.delete(gone.topic_id)
        with pytest.raises(StorageError):
            await delete(deletions, gone)
    await delete(deletions, gone)
    assert await rows(sql) == dict.fromkeys(TABLES, 0)


# --- groups -----------------------------------------------------------------------------------------------------------


async def test_a_group_and_its_offsets_are_removed_in_bounded_steps(
    database: Database, make_topic: MakeTopic, leases: list[CoordinatorLease], sql: asyncpg.Connection
) -> None:
    topic = await make_topic("t", 25)
    offset_store, groups = OffsetStore(database, deleted_at_a_time=4), GroupStore(database, deleted_at_a_time=5)
    for group_id in ("gone", "kept"):
        commits = [OffsetCommit(leases[0], group_id, -1, topic.topic_id, index, 1, -1, "") for index in range(25)]
        assert await offset_store.commit(commits) == [None] * 25
    assert await sql.fetchval(statement("delete_group"), "gone", *_fence(leases[0]), 10) == "more"
    assert len(await offset_store.fetch("gone")) == 15
    assert await groups.delete("gone", leases[0])
    assert not await groups.delete("gone", leases[0])
    await offset_store.delete("kept", [(topic.topic_id, index) for index in range(24)], leases[0])
    assert [offset.partition_index for offset in await offset_store.fetch("kept")] == [24]


def _fence(lease: CoordinatorLease) -> tuple[int, int, int]:
    return lease.shard, lease.node_id, lease.lease_epoch


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [5_000, 45_000])
async def test_a_step_costs_the_same_in_a_deep_partition_unknown_to_the_statistics(
    sql: asyncpg.Connection, make_topic: MakeTopic, depth: int
) -> None:
    topic = await make_topic(partition_count=11)
    new = await fill_unknown(sql, [partition.partition_key for partition in topic.partitions], depth)
    assert await pages_touched(sql, statement("delete_chunks"), new, 100) < 1_000
    assert await pages_touched(sql, statement("deleted_partitions"), topic.topic_id, 100) < 150
    assert await pages_touched(sql, statement("chunk_sizes"), new, 0, 2**60, 100) < 20


async def test_many_aborted_transactions_are_removed_in_bounded_steps(
    database: Database, topics: TopicStore, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    topic = await make_topic()
    (key,) = (partition.partition_key for partition in topic.partitions)
    await sql.execute(ABORTED, key, 5_000)
    await topics.delete(topic.topic_id)
    await sql.execute("update partition set deleted = true")
    assert await pages_touched(sql, statement("delete_partitions"), [key]) < 1_000
    assert await delete(DeletionStore(database, Steps(statements=4, producers=1_000)), topic) > 1
    assert await rows(sql) == dict.fromkeys(TABLES, 0)


async def test_a_steps_cost_follows_the_producers_offsets_and_partitions_that_it_removes(
    sql: asyncpg.Connection, make_topic: MakeTopic
) -> None:
    add = """
        insert into producer_state
        select key, id, 0, 0, 0, 0, 1, '{1,1,1,1,1}', '{1,1,1,1,1}', '{1,1,1,1,1}', now()
        from generate_series($1::bigint, $2) key, generate_series(1, $3) id
    """
    await sql.execute(add, 1, 10, 100)
    await sql.execute("vacuum analyze producer_state")
    await sql.execute(add, 11, 11, 5_000)
    assert await pages_touched(sql, statement("delete_producer_states"), 11, 100) < 1_000
    assert await pages_touched(sql, statement("expire_producers"), 2**45, 100, 11, 100) < 1_500

    topic = await make_topic("t", 3_000)
    await sql.execute(GROUP)
    await sql.execute("update topic set deleted_at = now()")
    await sql.executemany(COMMIT, [(topic.topic_id, index) for index in range(3_000)])
    assert await pages_touched(sql, statement("delete_offsets_of_topic"), topic.topic_id, 100) < 1_500
    # Postgres 15 touches 1,838 pages, Postgres 18 fewer.
    assert await pages_touched(sql, statement("fence_partitions"), topic.topic_id, 1_000, 100) < 2_500
    keys = [partition.partition_key for partition in topic.partitions[:100]]
    assert await pages_touched(sql, statement("delete_partitions"), keys) < 2_500
    assert await pages_touched(sql, statement("due_deletions"), 10) < 20
    assert await pages_touched(sql, statement("delete_group"), "g", 0, 1, 1, 100) < 1_500
