"""Committed offsets: fences, merging, exactness, expiry."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

import asyncpg
import pytest

from storage.console import ConsoleStore
from storage.deletion import DeletionStore
from storage.errors import StorageConflict
from storage.groups import GroupStore
from storage.journal import JournalOffset, JournalStore
from storage.nodes import NodeStore
from storage.offsets import ExpiredOffsets, KnownGroups, OffsetStore
from storage.pool import Database
from storage.queries import statement
from storage.topics import TopicStore
from storage.types import CommittedOffset, CoordinatorLease, OffsetCommit, Refusal, Topic
from tests.steps.waiting import until_blocked
from tests.storage.conftest import MakeTopic
from tests.storage.groups import group, load, member, save
from tests.storage.pages import pages_touched

DAY_MS = 24 * 60 * 60 * 1000


@pytest.fixture
def offsets(database: Database) -> OffsetStore:
    return OffsetStore(database)


@pytest.fixture
def groups(database: Database) -> GroupStore:
    return GroupStore(database)


@pytest.fixture
async def topic(make_topic: MakeTopic) -> Topic:
    return await make_topic("orders", 4)


@pytest.fixture
async def lease(leases: list[CoordinatorLease], groups: GroupStore) -> CoordinatorLease:
    """Shard 0, with the group "g" in generation 3, which has members."""
    await save(groups, group("g", generation_id=3), leases[0])
    return leases[0]


def commit(lease: CoordinatorLease, topic: Topic, **changes: object) -> OffsetCommit:
    return dataclasses.replace(
        OffsetCommit(lease, "g", 3, topic.topic_id, 0, 42, 7, "meta"),
        **changes,  # type: ignore[arg-type]
    )


async def committed(offsets: OffsetStore, group_id: str = "g") -> dict[int, int]:
    return {offset.partition_index: offset.committed_offset for offset in await offsets.fetch(group_id)}


@pytest.mark.parametrize(
    ("committed_offset", "leader_epoch", "metadata"),
    [
        (42, 7, "meta"),
        (0, -1, ""),
        (-1, 0, "with\0nul, \u241b and ünïcode \U0001f600"),
        (2**63 - 1, 2**31 - 1, "x" * 4096),
    ],
)
async def test_a_committed_offset_is_returned_exactly(
    offsets: OffsetStore,
    lease: CoordinatorLease,
    topic: Topic,
    committed_offset: int,
    leader_epoch: int,
    metadata: str,
) -> None:
    commits = [commit(lease, topic, committed_offset=committed_offset, leader_epoch=leader_epoch, metadata=metadata)]
    assert await offsets.commit(commits) == [None]
    (fetched,) = await offsets.fetch("g")
    at_ms = fetched.commit_timestamp_ms
    assert fetched == CommittedOffset(topic.topic_id, 0, committed_offset, leader_epoch, metadata, at_ms)
    assert await offsets.fetch("g", [(topic.topic_id, 0)]) == [fetched]


@pytest.mark.parametrize("committed_offset", [2**63 - 1, -(2**63)])
async def test_the_greatest_offsets_do_not_stop_the_first_page_of_the_console(
    database: Database, offsets: OffsetStore, lease: CoordinatorLease, topic: Topic, committed_offset: int
) -> None:
    """Clients may commit any offset. Two such offsets exceed what a sum of integers can hold."""
    commits = [commit(lease, topic, partition_index=index, committed_offset=committed_offset) for index in range(2)]
    assert await offsets.commit(commits) == [None, None]
    totals = await ConsoleStore(database).totals()
    assert totals["committed"] == 2.0 * committed_offset
    assert (await ConsoleStore(database).groups("", 10))[0]["lags"] == {"orders": 0}


async def test_the_least_offset_does_not_stop_the_history_of_a_lag(database: Database) -> None:
    journal = JournalStore(database)
    await journal.make_partitions()
    row = JournalOffset(
        at_ms=5,
        node_id=1,
        group_id="least",
        generation_id=-1,
        kind="commit",
        member_id=None,
        topic_id=None,
        topic="orders",
        partition=0,
        offset=-(2**63),
        log_start_offset=0,
        log_end_offset=7,
        error_code=0,
    )
    await journal.write([row])
    assert [each["lag"] for each in await ConsoleStore(database).lag_history("least", 0, 10, 10)] == [7]


async def test_a_later_commit_replaces_everything(
    offsets: OffsetStore, lease: CoordinatorLease, topic: Topic, sql: asyncpg.Connection
) -> None:
    await offsets.commit([commit(lease, topic, retention_ms=5)])
    await sql.execute("update committed_offset set commit_timestamp_ms = 7")
    await offsets.commit([commit(lease, topic, committed_offset=1, leader_epoch=-1, metadata="")])
    (fetched,) = await offsets.fetch("g")
    assert fetched.commit_timestamp_ms > 7
    assert fetched == CommittedOffset(topic.topic_id, 0, 1, -1, "", fetched.commit_timestamp_ms)
    assert await sql.fetchval("select expire_timestamp_ms from committed_offset") is None


async def test_commits_are_dated_by_postgres(
    offsets: OffsetStore, lease: CoordinatorLease, topic: Topic, now_ms: int, sql: asyncpg.Connection
) -> None:
    """If a gateway's clock is days behind, its commit must not be so old that it expires."""
    retentions = (None, 0, DAY_MS, 2**63 - 1)
    await offsets.commit(
        [commit(lease, topic, partition_index=index, retention_ms=ms) for index, ms in enumerate(retentions)]
    )
    rows = await sql.fetch("select * from committed_offset order by partition_index")
    at_ms = rows[0]["commit_timestamp_ms"]
    assert now_ms <= at_ms < now_ms + 60_000
    assert [row["expire_timestamp_ms"] for row in rows] == [None, at_ms, at_ms + DAY_MS, 2**63 - 1]


async def test_a_commit_that_names_a_member_is_fenced_by_its_epoch(
    offsets: OffsetStore, groups: GroupStore, leases: list[CoordinatorLease], topic: Topic
) -> None:
    """Members of one group have different epochs. The group's epoch says nothing about theirs."""
    await save(
        groups, group("g", group_type="consumer", generation_id=9, members=(member("a", 4), member("b", 5))), leases[0]
    )
    cases = {
        commit(leases[0], topic, member_id="a", generation_id=4): None,
        commit(leases[0], topic, member_id="a", generation_id=5): Refusal.STALE_MEMBER_EPOCH,
        commit(leases[0], topic, member_id="b", generation_id=5, partition_index=1): None,
        commit(leases[0], topic, member_id="b", generation_id=9): Refusal.STALE_MEMBER_EPOCH,
        commit(leases[0], topic, member_id="c", generation_id=5): Refusal.UNKNOWN_MEMBER,
        commit(leases[0], topic, member_id="c", generation_id=-1): Refusal.UNKNOWN_MEMBER,
        commit(leases[0], topic, group_id="none", member_id="c", generation_id=1): Refusal.ILLEGAL_GENERATION,
    }
    assert dict(zip(cases, await offsets.commit(list(cases)), strict=True)) == cases
    assert await committed(offsets) == {0: 42, 1: 42}


async def test_the_last_of_several_commits_of_a_partition_is_kept(
    offsets: OffsetStore, lease: CoordinatorLease, topic: Topic
) -> None:
    commits = [
        commit(lease, topic, partition_index=index, committed_offset=value)
        for index, value in [(0, 9), (1, 5), (0, 2), (1, 7), (0, 4)]
    ]
    assert await offsets.commit(commits) == [None] * 5
    assert await committed(offsets) == {0: 4, 1: 7}


async def test_a_refused_commit_does_not_win_over_an_accepted_one(
    offsets: OffsetStore, lease: CoordinatorLease, topic: Topic
) -> None:
    outcome = await offsets.commit(
        [commit(lease, topic, committed_offset=1), commit(lease, topic, committed_offset=2, generation_id=2)]
    )
    assert outcome == [None, Refusal.ILLEGAL_GENERATION]
    assert await committed(offsets) == {0: 1}


async def test_each_commit_is_judged_by_its_own_fence(
    offsets: OffsetStore, lease: CoordinatorLease, leases: list[CoordinatorLease], topic: Topic
) -> None:
    stale = dataclasses.replace(lease, lease_epoch=lease.lease_epoch - 1)
    elsewhere = dataclasses.replace(lease, shard=40)
    cases = {
        commit(lease, topic, partition_index=0): None,
        commit(lease, topic, partition_index=1, generation_id=2): Refusal.ILLEGAL_GENERATION,
        commit(lease, topic, partition_index=1, generation_id=4): Refusal.ILLEGAL_GENERATION,
        commit(lease, topic, partition_index=1, generation_id=-1): Refusal.ILLEGAL_GENERATION,
        commit(stale, topic, partition_index=1): Refusal.NOT_COORDINATOR,
        commit(elsewhere, topic, partition_index=1): Refusal.NOT_COORDINATOR,
        commit(lease, topic, partition_index=1, topic_id=UUID(int=9)): Refusal.UNKNOWN_TOPIC,
        commit(lease, topic, partition_index=4): Refusal.UNKNOWN_PARTITION,
        commit(leases[1], topic, group_id="missing"): Refusal.ILLEGAL_GENERATION,
        commit(leases[1], topic, group_id="missing", generation_id=0): Refusal.ILLEGAL_GENERATION,
        commit(leases[1], topic, group_id="simple", generation_id=-1): None,
        commit(stale, topic, group_id="fenced", generation_id=-1): Refusal.NOT_COORDINATOR,
    }
    order = list(cases)
    random.Random(5).shuffle(order)
    assert dict(zip(order, await offsets.commit(order), strict=True)) == cases
    assert await committed(offsets) == {0: 42}
    assert await committed(offsets, "simple") == {0: 42}
    assert await committed(offsets, "missing") == {}


async def test_a_simple_commit_creates_an_empty_group_without_type(
    offsets: OffsetStore, groups: GroupStore, leases: list[CoordinatorLease], topic: Topic
) -> None:
    for value in (1, 2):
        assert await offsets.commit(
            [commit(leases[2], topic, group_id="simple", generation_id=-1, committed_offset=value)]
        ) == [None]
    assert await committed(offsets, "simple") == {0: 2}
    record = await load(groups, "simple")
    assert record is not None
    assert (record.state, record.protocol_type, record.generation_id, record.members) == ("Empty", None, 0, ())
    assert (record.group_type, record.document) == ("classic", {})


async def test_a_fenced_simple_commit_creates_no_group(
    offsets: OffsetStore, groups: GroupStore, lease: CoordinatorLease, topic: Topic
) -> None:
    stale = dataclasses.replace(lease, lease_epoch=lease.lease_epoch - 1)
    await offsets.commit([commit(stale, topic, group_id="simple", generation_id=-1)])
    assert await load(groups, "simple") is None


async def test_a_simple_commit_is_accepted_once_a_group_has_lost_its_members(
    offsets: OffsetStore, groups: GroupStore, lease: CoordinatorLease, topic: Topic
) -> None:
    simple = commit(lease, topic, generation_id=-1)
    assert await offsets.commit([simple]) == [Refusal.ILLEGAL_GENERATION]
    await save(groups, group("g", state="Empty", generation_id=4, members=()), lease)
    assert await offsets.commit([simple]) == [None]


TAKEN_BY_ANY_RELEASE = """
update coordinator_lease
set node_id = $1, incarnation = 1, lease_epoch = lease_epoch + 1, expires_at = clock_timestamp()
where kind = 'groups' and shard = 0
"""
"""A takeover by a release that locks the row only with its update has this effect."""


@asynccontextmanager
async def commit_under_way(database: Database, lease: CoordinatorLease, topic: Topic) -> AsyncIterator[None]:
    """A commit of offset 42 that has been accepted and has not ended."""
    async with database.hot.connection() as connection, connection.transaction():
        refusals = await connection.fetchval(
            "select commit_offsets($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",
            [lease.shard], [lease.node_id], [lease.lease_epoch], ["g"], [None], [3], [1], [topic.topic_id], [0], [42],
            [-1], [""], [None],
        )  # fmt: skip
        assert refusals == [None]
        yield


async def test_a_change_of_coordinator_waits_for_running_commits(
    database: Database, offsets: OffsetStore, leases: list[CoordinatorLease], lease: CoordinatorLease, topic: Topic,
    sql: asyncpg.Connection,
) -> None:  # fmt: skip
    nodes = NodeStore(database)
    node_id = await nodes.register("localhost:9093", {"PLAINTEXT": ("localhost", 9093)}, None, 60_000)
    await sql.execute("update coordinator_lease set expires_at = '-infinity'")
    async with commit_under_way(database, lease, topic):
        # Free leases are acquired within the time that the next renewal may wait.
        async with asyncio.timeout(3):
            taken = await nodes.acquire_leases(node_id, [0, 1, 2], 60_000)
        assert [other.shard for other in taken] == [1, 2]
        await sql.execute("set lock_timeout = '100ms'")
        with pytest.raises(asyncpg.LockNotAvailableError):
            await sql.execute(TAKEN_BY_ANY_RELEASE, node_id)
    (taken,) = await nodes.acquire_leases(node_id, [0], 60_000)
    assert taken.lease_epoch == lease.lease_epoch + 1
    # The new owner sees what was acknowledged under the former lease, and no later commit of the former owner is
    # stored.
    assert await committed(offsets) == {0: 42}
    assert await offsets.commit([commit(lease, topic, committed_offset=41)]) == [Refusal.NOT_COORDINATOR]
    assert await committed(offsets) == {0: 42}


async def test_the_next_coordinator_waits_for_a_commit_that_ends_soon(
    database: Database, lease: CoordinatorLease, topic: Topic, sql: asyncpg.Connection
) -> None:
    nodes = NodeStore(database)
    node_id = await nodes.register("localhost:9093", {"PLAINTEXT": ("localhost", 9093)}, None, 60_000)
    await sql.execute("update coordinator_lease set expires_at = '-infinity'")
    taken: list[CoordinatorLease] = []
    for _ in range(20):  # A machine that stands still for 250 ms in between is no fault.
        async with commit_under_way(database, lease, topic):
            acquire = asyncio.create_task(nodes.acquire_leases(node_id, [0], 60_000))
            await until_blocked(sql, 1)
        if taken := await acquire:
            break
    assert [each.lease_epoch for each in taken] == [lease.lease_epoch + 1]


async def test_renewals_continue_beside_a_commit_that_postgres_holds(
    database: Database, leases: list[CoordinatorLease], lease: CoordinatorLease, topic: Topic, sql: asyncpg.Connection
) -> None:
    nodes = NodeStore(database)
    # The process that holds the leases was started again.
    node_id = await nodes.register("localhost:9092", {"PLAINTEXT": ("localhost", 9092)}, None, 60_000)
    held = await nodes.acquire_leases(node_id, [0, 1, 2], 60_000)
    async with commit_under_way(database, held[0], topic):
        # A session that waited for the commit's locks would fail after 5 s.
        async with asyncio.timeout(60):
            assert await nodes.renew_leases(node_id, held, 60_000) == held
            # Another commit and a save of a group of the shard succeed too.
            assert await OffsetStore(database).commit([commit(held[0], topic, partition_index=1)]) == [None]
            await save(GroupStore(database), group("h"), held[0])
            await nodes.release_leases(node_id, {0: None})
        assert await sql.fetchval("select expires_at <= clock_timestamp() from coordinator_lease where shard = 0")


async def test_fetching_partitions_returns_the_committed_ones(
    offsets: OffsetStore, lease: CoordinatorLease, topic: Topic
) -> None:
    await offsets.commit([commit(lease, topic, partition_index=index) for index in (0, 2)])
    wanted = [(topic.topic_id, 1), (topic.topic_id, 2), (UUID(int=3), 0)]
    assert [offset.partition_index for offset in await offsets.fetch("g", wanted)] == [2]
    assert await offsets.fetch("g", []) == []
    assert await offsets.fetch("nobody") == []


@pytest.mark.parametrize("require_stable", [False, True])
@pytest.mark.parametrize("known", [False, True], ids=["no statistics", "statistics from before"])
async def test_the_cost_of_a_fetch_follows_its_result_not_the_number_of_rows(
    sql: asyncpg.Connection, known: bool, require_stable: bool
) -> None:
    for table in ("topic", "consumer_group", "committed_offset", "pending_offset"):
        # An autovacuum that begins within the test would read half of the rows, or hold a lock that the test needs.
        await sql.execute(f"alter table {table} set (autovacuum_enabled = false)")
    await sql.execute("insert into topic (name) select 't' || i from generate_series(1, 5000) i")
    await sql.execute(
        "insert into consumer_group select 'g' || i, 0, 'classic', 'Empty', 0, null, 0, null, '{}' "
        "from generate_series(1, 20) i"
    )
    if known:
        await sql.execute("vacuum analyze topic, consumer_group, committed_offset, pending_offset")
    await sql.execute(
        "insert into committed_offset select group_id, topic_id, 0, 1, -1, '', 0 from consumer_group, topic "
        "where group_id <> 'g7' or name in ('t1', 't2500', 't5000')"
    )
    await sql.execute(
        "insert into pending_offset select group_id, topic_id, 0, 1, 1, -1, '', 0 from committed_offset "
        "where group_id in ('g1', 'g2')"
    )
    if known:
        await sql.execute("analyze topic")
    topic_ids = [row["topic_id"] for row in await sql.fetch("select topic_id from topic order by name limit 3")]
    assert await pages_touched(sql, statement("fetch_all_offsets"), ["g7"], require_stable) < 30
    assert await pages_touched(sql, statement("fetch_offsets"), ["g8"] * 3, topic_ids, [0, 0, 0], require_stable) < 30


async def test_a_topic_created_again_inherits_no_offsets(
    database: Database,
    offsets: OffsetStore,
    lease: CoordinatorLease,
    topic: Topic,
    topics: TopicStore,
    make_topic: MakeTopic,
    sql: asyncpg.Connection,
) -> None:
    await offsets.commit([commit(lease, topic)])
    await topics.delete(topic.topic_id)
    again = await make_topic("orders", 4)
    assert await offsets.fetch("g") == []
    assert await offsets.fetch("g", [(topic.topic_id, 0), (again.topic_id, 0)]) == []
    assert await offsets.commit([commit(lease, topic)]) == [Refusal.UNKNOWN_TOPIC]
    assert (await DeletionStore(database).advance(topic.topic_id)).gone
    assert await sql.fetchval("select count(*) from committed_offset") == 0


async def test_deleting_offsets_of_some_partitions_keeps_the_others(
    offsets: OffsetStore, lease: CoordinatorLease, topic: Topic
) -> None:
    await offsets.commit([commit(lease, topic, partition_index=index) for index in range(3)])
    await offsets.delete("g", [(topic.topic_id, 0), (topic.topic_id, 2), (UUID(int=1), 0)], lease)
    assert await committed(offsets) == {1: 42}
    with pytest.raises(StorageConflict):
        await offsets.delete("g", [(topic.topic_id, 1)], dataclasses.replace(lease, lease_epoch=99))
    assert await committed(offsets) == {1: 42}


async def test_nothing_to_commit(offsets: OffsetStore) -> None:
    assert await offsets.commit([]) == []


async def test_overlapping_committers_do_not_deadlock(
    database_url: str,
    groups: GroupStore,
    leases: list[CoordinatorLease],
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    for i in range(6):
        await save(groups, group(f"g{i}"), leases[i % 3])
    databases = [await Database.open(database_url, hot_connections=1, cold_connections=1) for _ in range(3)]

    async def run(store: OffsetStore, seed: int) -> None:
        random_ = random.Random(seed)
        for _ in range(30):
            commits = [
                commit(leases[i % 3], topic, group_id=f"g{i}", partition_index=random_.randrange(4))
                for i in (random_.randrange(6) for _ in range(10))
            ]
            assert await store.commit(commits) == [None] * 10

    async def rebalance() -> None:
        for i in range(30):
            await save(groups, group(f"g{i % 6}", document={"i": i}), leases[i % 3])

    try:
        await asyncio.gather(rebalance(), *(run(OffsetStore(database), i) for i, database in enumerate(databases)))
    finally:
        for database in databases:
            await database.close()
    assert await sql.fetchval("select deadlocks from pg_stat_database where datname = current_database()") == 0


# --- expiry: kafka-protocol.md §2.12, row by row ----------------------------------------------------------------------


@pytest.fixture
async def now_ms(sql: asyncpg.Connection) -> int:
    return int(await sql.fetchval("select (extract(epoch from clock_timestamp()) * 1000)::bigint") or 0)


async def store_group(
    sql: asyncpg.Connection,
    groups: GroupStore,
    lease: CoordinatorLease,
    topic: Topic,
    group_id: str,
    commit_ms: int,
    *,
    expire_ms: int | None = None,
    state_timestamp_ms: int | None = None,
    **changes: object,
) -> None:
    await save(groups, group(group_id, **changes), lease)
    if state_timestamp_ms is not None:
        await sql.execute(
            "update consumer_group set state_timestamp_ms = $2 where group_id = $1", group_id, state_timestamp_ms
        )
    await sql.execute(
        "insert into committed_offset values ($1, $2, 0, 1, -1, '', $3, $4)",
        group_id, topic.topic_id, commit_ms, expire_ms,
    )  # fmt: skip


EMPTY = {"state": "Empty", "members": ()}
SIMPLE = {**EMPTY, "protocol_type": None}


@pytest.mark.parametrize(
    ("changes", "commit_age_days", "expires"),
    [
        ({**EMPTY, "age_days": 8}, 0, True),
        ({**EMPTY, "age_days": 6}, 30, False),
        ({**SIMPLE, "age_days": 30}, 8, True),
        ({**SIMPLE, "age_days": 30}, 6, False),
        ({"age_days": 30}, 30, False),
        ({"state": "CompletingRebalance", "age_days": 30}, 30, False),
        ({"protocol_type": "connect", "age_days": 30}, 30, False),
        ({**EMPTY, "age_days": 0, "expire_in_days": -1}, 0, True),
        ({**EMPTY, "age_days": 30, "expire_in_days": 1}, 30, False),
        ({"age_days": 30, "expire_in_days": -1}, 30, False),
    ],
    ids=[
        "empty since long", "empty of late", "simple, old commit", "simple, new commit", "members, not settled",
        "rebalancing", "other type", "explicit time is past", "explicit time is to come", "explicit but in use",
    ],
)  # fmt: skip
async def test_offsets_expire_by_kafkas_rules(
    offsets: OffsetStore,
    groups: GroupStore,
    leases: list[CoordinatorLease],
    topic: Topic,
    sql: asyncpg.Connection,
    now_ms: int,
    changes: dict[str, object],
    commit_age_days: int,
    expires: bool,
) -> None:
    fields = dict(changes)
    state_timestamp_ms = now_ms - int(str(fields.pop("age_days"))) * DAY_MS
    expire_in_days = fields.pop("expire_in_days", None)
    expire_ms = None if expire_in_days is None else now_ms + int(str(expire_in_days)) * DAY_MS
    await store_group(
        sql, groups, leases[0], topic, "g", now_ms - commit_age_days * DAY_MS,
        expire_ms=expire_ms, state_timestamp_ms=state_timestamp_ms, **fields,
    )  # fmt: skip
    outcome = await offsets.expire(leases[0], 7 * DAY_MS, KnownGroups)
    assert outcome == (ExpiredOffsets(1, ("g",)) if expires else ExpiredOffsets(0, ()))
    assert (await load(groups, "g") is None) == expires
    assert len(await offsets.fetch("g")) == (0 if expires else 1)


async def test_offsets_of_subscribed_topics_do_not_expire(
    offsets: OffsetStore,
    groups: GroupStore,
    leases: list[CoordinatorLease],
    topic: Topic,
    make_topic: MakeTopic,
    sql: asyncpg.Connection,
) -> None:
    other = await make_topic("other")
    await store_group(sql, groups, leases[0], topic, "g", 5, members=(member("m2"),))
    await sql.execute("insert into committed_offset values ('g', $1, 0, 1, -1, '', 5, null)", other.topic_id)
    outcome = await offsets.expire(leases[0], DAY_MS, lambda: KnownGroups({"g": ["orders", "absent"]}, []))
    assert outcome == ExpiredOffsets(1, ())
    assert [offset.topic_id for offset in await offsets.fetch("g")] == [topic.topic_id]


async def test_offsets_of_a_group_that_was_rebalanced_since_the_coordinator_named_its_topics_do_not_expire(
    offsets: OffsetStore,
    groups: GroupStore,
    leases: list[CoordinatorLease],
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    """The statement may wait for the lease, and the members may subscribe to the topic during this time."""
    await store_group(sql, groups, leases[0], topic, "g", 5)
    generation_id = group().generation_id
    async with sql.transaction():
        await sql.execute("select from coordinator_lease for update")
        expiring = asyncio.create_task(
            offsets.expire(leases[0], DAY_MS, lambda: KnownGroups({"g": ["other"]}, [], {"g": generation_id}))
        )
        await until_blocked(sql, 1)
        await sql.execute("update consumer_group set generation_id = generation_id + 1")
    assert await expiring == ExpiredOffsets(0, ())
    known = KnownGroups({"g": ["other"]}, [], {"g": generation_id + 1})
    assert await offsets.expire(leases[0], DAY_MS, lambda: known) == ExpiredOffsets(1, ())


async def test_offsets_of_a_group_that_the_coordinator_names_unsettled_do_not_expire(
    offsets: OffsetStore,
    groups: GroupStore,
    leases: list[CoordinatorLease],
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    await store_group(sql, groups, leases[0], topic, "g", 5, state_timestamp_ms=5, **EMPTY)
    await save(groups, group("bare", **EMPTY), leases[0])
    nothing = await offsets.expire(leases[0], DAY_MS, lambda: KnownGroups({}, ["g", "bare"]))
    assert nothing == ExpiredOffsets(0, ())
    assert await offsets.expire(leases[0], DAY_MS, lambda: KnownGroups({}, ["g"])) == ExpiredOffsets(0, ("bare",))


async def test_a_pass_is_bounded_and_stays_within_its_shard(
    offsets: OffsetStore,
    groups: GroupStore,
    leases: list[CoordinatorLease],
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    for i in range(5):
        await store_group(sql, groups, leases[0], topic, f"g{i}", 5, state_timestamp_ms=5, **EMPTY)
    await store_group(sql, groups, leases[1], topic, "elsewhere", 5, state_timestamp_ms=5, **EMPTY)

    async def a_pass(**limits: int) -> ExpiredOffsets:
        return await offsets.expire(leases[0], DAY_MS, KnownGroups, **limits)

    assert await a_pass(group_limit=2) == ExpiredOffsets(2, ("g0", "g1"))
    assert await a_pass(offset_limit=1) == ExpiredOffsets(1, ("g2",))
    assert await a_pass() == ExpiredOffsets(2, ("g3", "g4"))
    assert len(await offsets.fetch("elsewhere")) == 1


async def test_a_lost_lease_expires_nothing(
    offsets: OffsetStore,
    groups: GroupStore,
    leases: list[CoordinatorLease],
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    await store_group(sql, groups, leases[0], topic, "g", 5, state_timestamp_ms=5, **EMPTY)
    with pytest.raises(StorageConflict):
        await offsets.expire(dataclasses.replace(leases[0], lease_epoch=99), DAY_MS, KnownGroups)
    assert len(await offsets.fetch("g")) == 1
