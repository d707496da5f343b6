"""Maintenance passes on a real Postgres: retention, purge, compaction, expiry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from uuid import UUID

import asyncpg
import pytest
import structlog.testing

import gateway.operate.maintenance as maintenance_module
from gateway.cluster.jobs import Job
from gateway.cluster.leases import SHARDS, shard_of
from gateway.config.broker_parsing import parse_broker_configs
from gateway.coordinator.classic.machine import CLASSIC
from gateway.coordinator.classic.model import Group, GroupState, Member
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import Summary
from gateway.operate.deletions import Deletions
from gateway.operate.maintenance import Compaction, Maintenance, Steps, subscriptions, unsettled
from gateway.security.delegation import DelegationTokens
from protocol.errors import ErrorCode
from storage.chunks import Chunk
from storage.compaction import CompactionRun, CompactionStore, DirtyRange
from storage.deletion import DeletionStore, Turn
from storage.deletion import Steps as DeletionSteps
from storage.errors import StorageError, StorageUnavailable
from storage.groups import GroupStore
from storage.mover import Mover
from storage.nodes import NodeStore
from storage.offsets import OffsetStore
from storage.pool import Database, Pool, Row
from storage.queries import statement
from storage.roller import Roller
from storage.tokens import TokenStore
from storage.types import CoordinatorLease, GroupChange, LeaseKind, NodeId, OffsetCommit, Topic
from tests.gateway.data_plane import DataPlane, batch_of, data_plane, offsets_in, records_in
from tests.gateway.operate.compaction import EAGER, compact, now_ms, send_pairs

HOUR_MS = 3_600_000


@pytest.fixture
async def node(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url) as node:
        yield node


def maintenance(node: DataPlane) -> Maintenance:
    return Maintenance(
        node.database,
        node.log,
        Roller(node.database, node.log, None),
        node.catalog,
        node.tail,
        list,
        lambda shard: [],
        deletions(node),
        node.transactions,
    )


LEASE = CoordinatorLease(Job.DELETION, NodeId(1), 1, LeaseKind.JOBS)


def deletions(node: DataPlane) -> Deletions:
    return Deletions(DeletionStore(node.database), lambda: LEASE)


async def content(node: DataPlane, topic: Topic) -> list[tuple[int, bytes | None, bytes | None]]:
    """Return the whole log as a reader reads it from Postgres."""
    node.tail.forget(topic.partitions[0].partition_key)
    found: list[tuple[int, bytes | None, bytes | None]] = []
    part = await node.fetch_one(topic, -1)
    offset, end = part.log_start_offset, part.high_watermark
    while offset < end:
        records = records_in(await node.fetch_one(topic, offset))
        if not records:
            break
        found += [(record.offset, record.key, record.value) for record in records]
        offset = records[-1].offset + 1
    return found


# --- retention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configs", "kept"),
    [
        # In another gateway, retention of -1 deleted everything, 30 days overflowed, and nothing was deleted unless a
        # policy was set.
        pytest.param({"retention.ms": "-1"}, [0, 1, 2], id="for ever"),
        pytest.param({"retention.ms": "2592000000"}, [1, 2], id="30 days"),
        pytest.param({}, [1, 2], id="default policy"),
        pytest.param({"retention.ms": str(HOUR_MS)}, [2], id="an hour"),
        pytest.param({"retention.ms": str(2**63 - 1)}, [0, 1, 2], id="64 bits"),
        pytest.param({"retention.ms": "-1", "retention.bytes": "0"}, [], id="no bytes"),
        pytest.param({"retention.ms": str(HOUR_MS), "cleanup.policy": "compact"}, [0, 1, 2], id="only compacted"),
        pytest.param({"retention.ms": str(HOUR_MS), "cleanup.policy": "compact,delete"}, [2], id="compacted too"),
    ],
)
async def test_retention(node: DataPlane, configs: Mapping[str, str], kept: list[int]) -> None:
    topic = await node.create_topic("t", configs=dict(configs))
    for age_ms in (40 * 24 * HOUR_MS, 2 * HOUR_MS, 0):
        await node.send(topic, batch_of(b"v", timestamps=[now_ms() - age_ms], keys=[b"%d" % age_ms]))
    await maintenance(node).retain()
    assert [offset for offset, _, _ in await content(node, topic)] == kept
    assert (await node.list_offset(topic, -1)).offset == 3
    assert (await node.list_offset(topic, -2)).offset == (kept[0] if kept else 3)


async def test_retention_moves_the_tail_as_well(node: DataPlane) -> None:
    topic = await node.create_topic("t", configs={"retention.ms": str(HOUR_MS)})
    for age_ms in (2 * HOUR_MS, 0):
        await node.send(topic, batch_of(b"v", timestamps=[now_ms() - age_ms]))
    assert offsets_in(await node.fetch_one(topic, 0)) == [0, 1]
    await maintenance(node).retain()
    assert (await node.fetch_one(topic, 0)).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    assert offsets_in(await node.fetch_one(topic, 1)) == [1]


async def test_a_failed_pass_and_a_lost_answer_leave_no_removed_record_in_the_tail(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node without others believes the log starts that it knows, so it would serve these records on and on."""
    first, second, third = [await node.create_topic(name, configs={"retention.ms": str(HOUR_MS)}) for name in "abc"]
    for topic in (first, second):
        for age_ms in (2 * HOUR_MS, 0):
            await node.send(topic, batch_of(b"v", timestamps=[now_ms() - age_ms]))
    await node.fill(third, [300] * 2)
    await node.log.delete_records(third.partitions[0].partition_key, 1)  # the answer to the node is lost
    fetch_row = Pool.fetch_row

    async def lost(pool: Pool, query: str, *arguments: object) -> Row | None:
        if query == statement("delete_below_log_start") and arguments[0] == second.partitions[0].partition_key:
            raise StorageUnavailable("the connection is lost")
        return await fetch_row(pool, query, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Pool, "fetch_row", lost)
        with pytest.raises(StorageUnavailable):
            await maintenance(node).retain()
    for topic in (first, third):
        assert (await node.fetch_one(topic, 0)).error_code == ErrorCode.OFFSET_OUT_OF_RANGE, topic.name
        assert offsets_in(await node.fetch_one(topic, 1)) == [1]


async def test_rows_of_deleted_records_are_removed(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t", configs={"retention.ms": "-1"})
    await node.fill(topic, [300] * 5)
    await node.log.delete_records(topic.partitions[0].partition_key, 3)
    await maintenance(node).retain()
    assert await count_rows(database_url, "chunk") == 2


async def test_a_deleted_topic_leaves_nothing(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    await node.fill(topic, [300] * 5)
    await node.delete_topic(topic)
    await node.catalog.refresh_if_changed()
    node.membership.connect(catalog_revision=lambda: node.catalog.revision)
    await node.membership.renew()
    await maintenance(node).deletions.run()
    for table in ("chunk", "partition", "topic"):
        assert await count_rows(database_url, table) == 0


async def test_a_topic_deleted_during_the_deletion_of_a_large_one_does_not_wait_for_it(node: DataPlane) -> None:
    large, small = [await node.create_topic(name) for name in ("large", "small")]
    await node.fill(large, [300] * 40)
    gone: list[str] = []

    async def hide(topic: Topic) -> None:
        await node.delete_topic(topic)
        await node.catalog.refresh_if_changed()
        await node.membership.renew()

    class Interrupted(DeletionStore):
        """Deletes the small topic during the first turn of the large one."""

        async def advance(self, topic_id: UUID) -> Turn:
            turn = await super().advance(topic_id)
            if topic_id == large.topic_id and node.catalog.get(small.name) is not None:
                await hide(small)
            if turn.gone:
                gone.append("large" if topic_id == large.topic_id else "small")
            return turn

    node.membership.connect(catalog_revision=lambda: node.catalog.revision)
    await hide(large)
    steps = DeletionSteps(statements=3, chunks=1)
    await Deletions(Interrupted(node.database, steps), lambda: LEASE).run()
    assert gone == ["small", "large"]


async def count_rows(url: str, table: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval(f"select count(*) from sluice.{table}"))
    finally:
        await connection.close()


# --- compaction ------------------------------------------------------------------------------------------------------


async def test_compaction_keeps_the_newest_of_each_key(node: DataPlane) -> None:
    topic = await node.create_topic("t", configs=EAGER)
    await send_pairs(node, topic, (b"a", b"1"), (b"b", b"1"))
    await send_pairs(node, topic, (b"a", b"2"))
    await send_pairs(node, topic, (b"c", b"1"), (b"b", b"2"))
    await send_pairs(node, topic, (b"end", b"1"))
    await compact(node)
    expected = [(2, b"a", b"2"), (3, b"c", b"1"), (4, b"b", b"2"), (5, b"end", b"1")]
    assert await content(node, topic) == expected
    await compact(node)
    assert await content(node, topic) == expected
    state = (await node.log.states([topic.partitions[0].partition_key]))[topic.partitions[0].partition_key]
    assert (state.log_start_offset, state.high_watermark) == (0, 6)


async def test_compacted_records_are_not_served_from_memory(node: DataPlane) -> None:
    compacted, other = [await node.create_topic(name, configs=EAGER) for name in ("compacted", "other")]
    for topic in (compacted, other):
        for value in (b"1", b"2", b"3"):
            await send_pairs(node, topic, (b"a", value))
    await compact(node)
    await send_pairs(node, compacted, (b"b", b"1"))
    await maintenance(node).drop_compacted()
    assert offsets_in(await node.fetch_one(compacted, 0)) == [1, 2, 3]
    assert node.tail.holds(compacted.partitions[0].partition_key), "what is not clean yet stays in memory"


async def test_appending_continues_at_the_end_of_the_log(node: DataPlane) -> None:
    topic = await node.create_topic("t", configs=EAGER)
    for value in (b"1", b"2", b"3"):
        await send_pairs(node, topic, (b"a", value))
    await compact(node)
    await send_pairs(node, topic, (b"a", b"4"))
    assert await content(node, topic) == [(1, b"a", b"2"), (2, b"a", b"3"), (3, b"a", b"4")]
    await compact(node)
    assert await content(node, topic) == [(2, b"a", b"3"), (3, b"a", b"4")]
    found = await node.fetch_one(topic, 0)
    assert offsets_in(found) == [2, 3], "a reader in the gap goes on to the next record"


async def test_tombstones_are_removed_in_the_end(node: DataPlane) -> None:
    topic = await node.create_topic("t", configs={**EAGER, "delete.retention.ms": "0"})
    await send_pairs(node, topic, (b"a", b"1"))
    await send_pairs(node, topic, (b"a", None), (b"b", b"1"))
    await send_pairs(node, topic, (b"end", b"1"))
    await compact(node)
    assert await content(node, topic) == [(1, b"a", None), (2, b"b", b"1"), (3, b"end", b"1")]
    await send_pairs(node, topic, (b"end", b"2"))
    await compact(node)
    assert await content(node, topic) == [(2, b"b", b"1"), (3, b"end", b"1"), (4, b"end", b"2")]


@pytest.mark.parametrize(
    "configs",
    [
        pytest.param({"segment.ms": str(HOUR_MS)}, id="segment.ms"),
        pytest.param({"min.compaction.lag.ms": str(HOUR_MS)}, id="min.compaction.lag.ms"),
        pytest.param({"cleanup.policy": "delete"}, id="not compacted"),
    ],
)
async def test_records_younger_than_the_lag_stay(node: DataPlane, configs: Mapping[str, str]) -> None:
    topic = await node.create_topic("t", configs={**EAGER, **configs})
    for value in (b"1", b"2", b"3"):
        await send_pairs(node, topic, (b"a", value))
    await compact(node)
    assert len(await content(node, topic)) == 3


async def test_max_compaction_lag_outranks_segment_ms(node: DataPlane) -> None:
    topic = await node.create_topic("t", configs={**EAGER, "segment.ms": str(HOUR_MS), "max.compaction.lag.ms": "500"})
    for value in (b"1", b"2", b"3"):
        await send_pairs(node, topic, (b"a", value))
    await compact(node)
    assert len(await content(node, topic)) == 2


async def test_compaction_continues_if_the_log_start_moves_during_a_run(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await node.create_topic("t", configs=EAGER)
    for value in (b"1", b"2", b"3", b"4"):
        await send_pairs(node, topic, (b"a", value))
    await send_pairs(node, topic, (b"end", b"1"))
    begin = CompactionStore.begin

    async def begin_and_delete(store: CompactionStore, dirty: DirtyRange) -> CompactionRun:
        await node.log.delete_records(topic.partitions[0].partition_key, 1)
        await maintenance(node).retain()
        return await begin(store, dirty)

    monkeypatch.setattr(CompactionStore, "begin", begin_and_delete)
    await compact(node)
    assert await content(node, topic) == [(3, b"a", b"4"), (4, b"end", b"1")]


async def test_compaction_of_a_log_that_begins_within_a_batch(node: DataPlane) -> None:
    topic = await node.create_topic("t", configs={**EAGER, "cleanup.policy": "compact,delete"})
    await send_pairs(node, topic, *((b"%d" % key, b"1") for key in range(5)))
    for value in (b"2", b"3"):
        await send_pairs(node, topic, (b"4", value))
    await send_pairs(node, topic, (b"end", b"1"))
    await node.log.delete_records(topic.partitions[0].partition_key, 3)
    await compact(node)
    kept = [record for record in await content(node, topic) if record[0] >= 3]
    assert kept == [(3, b"3", b"1"), (6, b"4", b"3"), (7, b"end", b"1")]


async def test_compaction_of_a_partition_that_fails_delays_no_other(node: DataPlane) -> None:
    failing, other = [await node.create_topic(name, configs=EAGER) for name in ("failing", "other")]
    for topic in (failing, other):
        for _ in range(3):
            await send_pairs(node, topic, (b"a", b"1"))
    key = failing.partitions[0].partition_key
    await node.database.cold.fetch(
        f"alter table compaction_state add constraint refused check (partition_key <> {key})"
    )
    try:
        with pytest.raises(StorageError, match="refused"):
            await compact(node)
    finally:
        await node.database.cold.fetch("alter table compaction_state drop constraint refused")
    assert [offset for offset, *_ in await content(node, other)] == [1, 2]
    await compact(node)
    assert [offset for offset, *_ in await content(node, failing)] == [1, 2]


async def test_compaction_names_records_that_cannot_be_read(node: DataPlane) -> None:
    topic = await node.create_topic("t", configs=EAGER)
    for value in (b"1", b"2", b"3"):
        await send_pairs(node, topic, (b"a", value))
    await node.database.cold.fetch("delete from inline_records where base_offset = 1")
    with structlog.testing.capture_logs() as logs:
        await compact(node)
    (reason,) = [entry["reason"] for entry in logs if entry["event"] == "compaction overtaken"]
    assert reason == "the records at offset 1 cannot be read: run sluice check"


async def test_many_partitions_with_unreadable_records_keep_no_other_from_compaction(node: DataPlane) -> None:
    """One lost segment holds records of many partitions. They stay the dirtiest, and a pass cleans ten."""
    names = [*(f"damaged-{number}" for number in range(10)), "other"]
    topics = [await node.create_topic(name, configs=EAGER) for name in names]
    for topic in topics:
        for _ in range(3):
            await send_pairs(node, topic, (b"a", b"1"))
    other = topics[-1]
    key = other.partitions[0].partition_key
    await node.database.cold.fetch(f"delete from inline_records where base_offset = 1 and partition_key <> {key}")
    clock = iter([0.0, 20.0, 40.0])
    compaction = Compaction(node.database, node.log, node.catalog, monotonic=lambda: next(clock))
    await compaction.run()
    assert [offset for offset, *_ in await content(node, other)] == [0, 1, 2], "not among the ten"
    await compaction.run()
    assert [offset for offset, *_ in await content(node, other)] == [1, 2]
    with structlog.testing.capture_logs() as logs:
        await compaction.run()
    assert sum(entry["event"] == "compaction overtaken" for entry in logs) == 10, "they are tried again"


async def test_tombstones_may_be_kept_for_ever(node: DataPlane) -> None:
    topic = await node.create_topic("t", configs={**EAGER, "delete.retention.ms": str(2**63 - 1)})
    await send_pairs(node, topic, (b"a", b"1"))
    await send_pairs(node, topic, (b"a", None))
    await send_pairs(node, topic, (b"end", b"1"))
    for _ in range(2):
        await compact(node)
        await send_pairs(node, topic, (b"end", b"1"))
    assert (1, b"a", None) in await content(node, topic)


@pytest.mark.parametrize("one_chunk", [False, True])
async def test_a_log_with_more_keys_than_memory_is_cleaned_in_runs(node: DataPlane, one_chunk: bool) -> None:
    """With `one_chunk`, the topic's batches were merged into one chunk before. So a run of the cleaner ends within a
    chunk.
    """
    topic = await node.create_topic("t", configs=EAGER)
    for version in (b"1", b"2"):
        for key in range(50):
            await send_pairs(node, topic, (b"%d" % key, version), (b"all", version))
    if one_chunk:
        key_of_log = topic.partitions[0].partition_key

        async def pages() -> AsyncIterator[list[Chunk]]:
            yield await node.log.chunks_between(key_of_log, 0, 199)

        assert await Mover(node.database, node.log, None).move(pages())
        assert len(await node.log.chunks_between(key_of_log, 0, 199)) == 1
    await send_pairs(node, topic, (b"end", b"1"))
    for _ in range(30):
        await compact(node, max_keys=10, chunk_bytes=1000)
    log = await content(node, topic)
    assert {key: value for _, key, value in log} == {
        **{b"%d" % key: b"2" for key in range(50)},
        b"all": b"2",
        b"end": b"1",
    }
    assert len(log) == 52
    assert [offset for offset, _, _ in log] == sorted(offset for offset, _, _ in log)


async def test_idle_topics_wait_for_the_cleaners_backoff(node: DataPlane) -> None:
    node.catalog.set_broker(parse_broker_configs({"log.cleaner.backoff.ms": "3600000"}))
    await node.create_topic("slow", configs={**EAGER, "segment.ms": str(2 * HOUR_MS)})
    await node.create_topic("fast", configs={**EAGER, "segment.ms": "500"})
    await node.create_topic("deleted", configs={"cleanup.policy": "delete"})
    clock = [100.0]
    compaction = Compaction(node.database, node.log, node.catalog, monotonic=lambda: clock[0])
    due: list[set[str]] = []
    for now_s in (100.0, 100.4, 100.5, 3699.0, 3700.0):
        clock[0] = now_s
        due.append({topic.name for topic, _ in await compaction.due_topics()})
    assert due == [{"slow", "fast"}, set(), {"fast"}, {"fast"}, {"slow", "fast"}]


# --- who runs what ---------------------------------------------------------------------------------------------------


async def test_every_pass_runs_on_an_empty_node(node: DataPlane) -> None:
    for each in maintenance(node).passes():
        await each.run()
        assert each.interval_ms > 0


def test_passes_over_the_whole_log_are_jobs_and_local_passes_are_not(node: DataPlane) -> None:
    assert {each.name for each in maintenance(node).passes() if each.job is None} == {
        "compacted tails",
        "clock",
        "offset expiry",
    }


async def test_idle_producers_are_forgotten_under_any_clock_of_this_node(
    node: DataPlane, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [batch_of(b"a", producer=(producer_id, 0, 0)) for producer_id in (7, 8)]
    real_ms = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real_ms() + 8 * 24 * HOUR_MS * 1_000_000)
    topic = await node.create_topic("t")
    for batch in batches:
        await node.send(topic, batch)
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        "update sluice.producer_state set appended_at = now() - interval '25 hours' where producer_id = 7"
    )
    await connection.close()
    await maintenance(node).expire_producers()
    assert await count_rows(database_url, "producer_state") == 1


async def test_expired_tokens_are_removed_under_any_clock_of_this_node(
    node: DataPlane, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_ms = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real_ms() + 8 * 24 * HOUR_MS * 1_000_000)
    tokens = DelegationTokens(TokenStore(node.database), "key", max_lifetime_ms=24 * HOUR_MS, expiry_ms=HOUR_MS)
    for _ in range(6):
        assert await tokens.create("ann", "ann", (), -1) is not None
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        "update sluice.delegation_token set expires_ms = 1 where token_id in "
        "(select token_id from sluice.delegation_token limit 5)"
    )
    await connection.close()
    made = maintenance(node)
    made.steps = Steps(tokens=2)
    await made.expire_tokens()
    assert await count_rows(database_url, "delegation_token") == 1


async def test_old_offsets_expire_in_rounds_except_those_of_active_groups(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t", 5)
    nodes, offsets = NodeStore(node.database), OffsetStore(node.database)
    node_id = await nodes.register("127.0.0.1:9093", {"PLAINTEXT": ("127.0.0.1", 9093)}, None, 60_000)
    leases = await nodes.acquire_leases(node_id, range(SHARDS), 60_000)
    stale = replace(leases[shard_of("fenced")], lease_epoch=0)
    old_ms = now_ms() - 8 * 24 * HOUR_MS
    sql = await asyncpg.connect(database_url)
    for group_id, at_ms in (
        ("old", old_ms),
        ("young", old_ms + 2 * 24 * HOUR_MS),
        ("reads", old_ms),
        ("fenced", old_ms),
    ):
        commits = [
            OffsetCommit(leases[shard_of(group_id)], group_id, -1, topic.topic_id, index, 1, -1, "")
            for index in range(5)
        ]
        assert await offsets.commit(commits) == [None] * 5
        await sql.execute(
            "update sluice.committed_offset set commit_timestamp_ms = $2 where group_id = $1", group_id, at_ms
        )
    await sql.close()
    reads = CLASSIC.summary(
        Group("reads", state=GroupState.STABLE, protocol_type="consumer", subscribed_topics=frozenset({"t"}))
    )
    held = [stale, *(lease for lease in leases if lease.shard != stale.shard)]
    await Maintenance(
        node.database,
        node.log,
        Roller(node.database, node.log, None),
        node.catalog,
        node.tail,
        lambda: held,
        lambda shard: [reads] if shard == shard_of("reads") else [],
        deletions(node),
        node.transactions,
        steps=Steps(offsets=2),
    ).expire_offsets()
    left = {group_id: len(await offsets.fetch(group_id)) for group_id in ("old", "young", "reads", "fenced")}
    assert left == {"old": 0, "young": 5, "reads": 5, "fenced": 5}
    assert "old" not in {group_id for group_id, *_ in await GroupStore(node.database).list()}


async def test_offsets_of_a_member_that_joins_while_expiry_waits_for_a_connection_stay(
    node: DataPlane, database_url: str
) -> None:
    topic = await node.create_topic("t")
    nodes, offsets = NodeStore(node.database), OffsetStore(node.database)
    node_id = await nodes.register("127.0.0.1:9093", {"PLAINTEXT": ("127.0.0.1", 9093)}, None, 60_000)
    (lease,) = await nodes.acquire_leases(node_id, [shard_of("g")], 60_000)
    assert await offsets.commit([OffsetCommit(lease, "g", -1, topic.topic_id, 0, 1, -1, "")]) == [None]
    sql = await asyncpg.connect(database_url)
    await sql.execute("update sluice.committed_offset set commit_timestamp_ms = 1")
    await sql.close()
    known: list[Summary] = []
    expiry = maintenance(node)
    expiry.leases, expiry.groups = (lambda: [lease]), (lambda _shard: list(known))
    expiry.database = await Database.open(database_url, hot_connections=1, cold_connections=1)
    try:
        async with expiry.database.cold.connection():
            expiring = asyncio.create_task(expiry.expire_offsets())
            for _ in range(10):
                await asyncio.sleep(0)
            known.append(CLASSIC.summary(Group("g", state=GroupState.PREPARING_REBALANCE, protocol_type="consumer")))
        await expiring
    finally:
        await expiry.database.close()
    assert len(await offsets.fetch("g")) == 1


def test_offsets_expire_only_for_groups_without_readers() -> None:
    member = Member(MemberId("m"), None, "c", "h", 1, 1, ())
    stable = Group(
        "stable",
        state=GroupState.STABLE,
        protocol_type="consumer",
        members={member.member_id: member},
        subscribed_topics=frozenset({"t"}),
    )
    groups = [
        stable,
        replace(stable, group_id="opaque", subscribed_topics=None),
        replace(stable, group_id="connect", protocol_type="connect"),
        replace(stable, group_id="rebalancing", state=GroupState.PREPARING_REBALANCE),
        replace(stable, group_id="empty", state=GroupState.EMPTY, members={}, subscribed_topics=None),
    ]
    summaries = [CLASSIC.summary(group) for group in groups]
    assert subscriptions(summaries) == {"stable": frozenset({"t"})}
    assert unsettled(summaries) == ["opaque", "connect", "rebalancing"]


async def test_a_group_that_is_empty_when_the_node_starts_is_still_there_after_the_first_pass(node: DataPlane) -> None:
    """The group's members may be about to return. If the group were removed, they would see generations start again at
    1.
    """
    nodes, groups = NodeStore(node.database), GroupStore(node.database)
    node_id = await nodes.register("127.0.0.1:9093", {"PLAINTEXT": ("127.0.0.1", 9093)}, None, 60_000)
    leases = await nodes.acquire_leases(node_id, range(SHARDS), 60_000)
    lease = leases[shard_of("g")]
    await groups.save([GroupChange(lease, "g", "classic", "Empty", "consumer", 7, {}, True)])
    maintenance = Maintenance(
        node.database,
        node.log,
        Roller(node.database, node.log, None),
        node.catalog,
        node.tail,
        lambda: leases,
        lambda shard: [],
        deletions(node),
        node.transactions,
    )
    (expire,) = [each.run for each in maintenance.passes() if each.name == "offset expiry"]
    await expire()
    assert [group_id for group_id, *_ in await groups.list()] == ["g"]
    await expire()
    assert await groups.list() == []


@pytest.mark.parametrize(
    ("behind_ms", "told"), [(0, False), (50_000, False), (8 * 24 * HOUR_MS, True), (-90_000, True)]
)
async def test_clock_far_from_postgres_is_logged(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch, behind_ms: int, told: bool
) -> None:
    real_ms = now_ms
    monkeypatch.setattr(maintenance_module, "wall_ms", lambda: real_ms() - behind_ms)
    with structlog.testing.capture_logs() as logged:
        await maintenance(node).compare_clocks()
    assert [line["ahead_s"] for line in logged] == ([pytest.approx(-behind_ms / 1000, abs=5)] if told else [])
