"""Offsets committed in a transaction: fenced by its producer and by the group, pending until the transaction ends."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import asyncpg
import pytest

from protocol.records import ControlType, end_marker
from storage.deletion import DeletionStore
from storage.groups import GroupStore
from storage.offsets import ExpiredOffsets, KnownGroups, OffsetStore
from storage.pool import Database
from storage.topics import TopicStore
from storage.transactions import EndedTransaction, ProducerRecord, TransactionStore
from storage.types import CommittedOffset, CoordinatorLease, OffsetCommit, Refusal, Topic
from tests.steps.waiting import until_blocked
from tests.storage.conftest import MakeTopic
from tests.storage.groups import group, load, member, save

T = "transactional"
PRODUCER, EPOCH = 4_000, 7
DAY_MS = 24 * 60 * 60 * 1000


@pytest.fixture
def offsets(database: Database) -> OffsetStore:
    return OffsetStore(database)


@pytest.fixture
def groups(database: Database) -> GroupStore:
    return GroupStore(database)


@pytest.fixture
def transactions(database: Database) -> TransactionStore:
    return TransactionStore(database)


@pytest.fixture
async def topic(make_topic: MakeTopic) -> Topic:
    return await make_topic("orders", 4)


@pytest.fixture
async def lease(leases: list[CoordinatorLease], groups: GroupStore) -> CoordinatorLease:
    """Shard 0, with the group "g" in generation 3, which has members."""
    await save(groups, group("g", generation_id=3), leases[0])
    return leases[0]


def record(state: str, producer_id: int = PRODUCER, producer_epoch: int = EPOCH) -> ProducerRecord:
    return ProducerRecord(producer_id, producer_epoch, -1, -1, 60_000, state)


async def begun(
    transactions: TransactionStore, *group_ids: str, transactional_id: str = T, producer_id: int = PRODUCER
) -> None:
    """Begin a transaction and enlist these groups in it."""
    read = await transactions.read(transactional_id)
    if not read.revision:
        assert await transactions.save(read, record("Empty", producer_id))
    assert await transactions.add(await transactions.read(transactional_id), [], group_ids)


async def ended(
    transactions: TransactionStore, *, committed: bool = True, transactional_id: str = T
) -> EndedTransaction:
    read = await transactions.read(transactional_id)
    assert read.record is not None
    marker = end_marker(
        ControlType.COMMIT if committed else ControlType.ABORT,
        producer_id=read.record.producer_id,
        producer_epoch=read.record.producer_epoch,
        timestamp_ms=1_000,
    )
    complete = dataclasses.replace(read.record, state="CompleteCommit" if committed else "CompleteAbort")
    outcome = await transactions.end(read, complete, marker, committed=committed, timestamp_ms=1_000)
    assert outcome is not None
    return outcome


def commit(lease: CoordinatorLease, topic: Topic, **changes: object) -> OffsetCommit:
    return dataclasses.replace(
        OffsetCommit(lease, "g", 3, topic.topic_id, 0, 42, 7, "meta"),
        **changes,  # type: ignore[arg-type]
    )


async def pending(sql: asyncpg.Connection) -> dict[tuple[str, int, int], int]:
    """Return pending offsets by group, partition and producer."""
    return {
        (row["group_id"], row["partition_index"], row["producer_id"]): row["committed_offset"]
        for row in await sql.fetch("select * from pending_offset")
    }


async def committed(offsets: OffsetStore, group_id: str = "g") -> dict[int, int]:
    return {offset.partition_index: offset.committed_offset for offset in await offsets.fetch(group_id)}


# --- what is taken ------------------------------------------------------------------------------------------------


async def test_offsets_become_visible_when_the_transaction_commits(
    offsets: OffsetStore, transactions: TransactionStore, lease: CoordinatorLease, topic: Topic, now_ms: int
) -> None:
    await begun(transactions, "g")
    metadata = "with\0nul, \u241b and ünïcode"
    commits = [commit(lease, topic, metadata=metadata), commit(lease, topic, partition_index=1, committed_offset=-1)]
    assert await offsets.commit_in_transaction(commits, T, PRODUCER, EPOCH) == [None, None]
    assert await offsets.fetch("g") == []
    assert (await ended(transactions)).group_ids == ("g",)
    first, second = await offsets.fetch("g")
    assert now_ms <= first.commit_timestamp_ms < now_ms + 60_000
    assert first == CommittedOffset(topic.topic_id, 0, 42, 7, metadata, first.commit_timestamp_ms)
    assert second.committed_offset == -1


async def test_a_transaction_accepts_no_more_offsets_than_its_end_can_settle(
    database: Database, transactions: TransactionStore, lease: CoordinatorLease, topic: Topic
) -> None:
    offsets = OffsetStore(database, max_pending=3)
    await begun(transactions, "g")

    async def take(*partitions: int) -> list[Refusal | None]:
        asked = [commit(lease, topic, partition_index=partition) for partition in partitions]
        return await offsets.commit_in_transaction(asked, T, PRODUCER, EPOCH)

    too_large = Refusal.TRANSACTION_TOO_LARGE
    assert await take(0, 1, 2, 3) == [too_large] * 4
    assert await take(0, 1) == [None, None]
    assert await take(2, 3) == [too_large] * 2
    assert await take(2) == [None]
    assert await take(3) == [too_large]
    assert await take(0, 1, 2) == [None] * 3, "a repeated commit of a partition counts once"
    assert await take(2, 3) == [too_large] * 2
    await ended(transactions)
    assert await committed(offsets) == {0: 42, 1: 42, 2: 42}
    await begun(transactions, "g")
    assert await take(3) == [None]


async def test_offsets_of_an_aborted_transaction_are_discarded(
    offsets: OffsetStore,
    transactions: TransactionStore,
    lease: CoordinatorLease,
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    await offsets.commit([commit(lease, topic, committed_offset=1)])
    await begun(transactions, "g")
    await offsets.commit_in_transaction([commit(lease, topic)], T, PRODUCER, EPOCH)
    assert (await ended(transactions, committed=False)).group_ids == ()
    assert await committed(offsets) == {0: 1}
    assert await pending(sql) == {}


async def test_the_last_of_several_commits_of_a_partition_is_kept(
    offsets: OffsetStore,
    transactions: TransactionStore,
    lease: CoordinatorLease,
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    await begun(transactions, "g")
    for values in ((9, 5, 2), (7, 4)):
        commits = [commit(lease, topic, committed_offset=value) for value in values]
        refusals = await offsets.commit_in_transaction(commits, T, PRODUCER, EPOCH)
        assert refusals == [None] * len(values)
        assert await pending(sql) == {("g", 0, PRODUCER): values[-1]}


@pytest.mark.parametrize(
    ("transactional_id", "producer_id", "producer_epoch", "refusal"),
    [
        ("another", PRODUCER, EPOCH, Refusal.INVALID_PRODUCER_ID_MAPPING),
        (T, PRODUCER + 1, EPOCH, Refusal.INVALID_PRODUCER_ID_MAPPING),
        (T, PRODUCER, EPOCH - 1, Refusal.INVALID_PRODUCER_EPOCH),
        (T, PRODUCER, EPOCH + 1, Refusal.INVALID_PRODUCER_EPOCH),
    ],
)
async def test_only_its_own_producer_commits_in_a_transaction(
    offsets: OffsetStore,
    transactions: TransactionStore,
    lease: CoordinatorLease,
    topic: Topic,
    sql: asyncpg.Connection,
    transactional_id: str,
    producer_id: int,
    producer_epoch: int,
    refusal: Refusal,
) -> None:
    """The producer is checked before anything else about the commit."""
    await begun(transactions, "g")
    commits = [commit(lease, topic), commit(lease, topic, partition_index=9, generation_id=2)]
    refused = await offsets.commit_in_transaction(commits, transactional_id, producer_id, producer_epoch)
    assert refused == [refusal, refusal]
    assert await pending(sql) == {}


async def test_a_commit_needs_an_open_transaction_with_the_group_enlisted(
    offsets: OffsetStore,
    groups: GroupStore,
    transactions: TransactionStore,
    leases: list[CoordinatorLease],
    lease: CoordinatorLease,
    topic: Topic,
) -> None:
    async def refusal(**changes: object) -> Refusal | None:
        commits = [commit(lease, topic, **changes)]
        return (await offsets.commit_in_transaction(commits, T, PRODUCER, EPOCH))[0]

    assert await transactions.save(await transactions.read(T), record("Empty"))
    assert await refusal() is Refusal.NOT_IN_TRANSACTION
    await begun(transactions, "another")
    await begun(transactions, "g", transactional_id="other", producer_id=PRODUCER + 1)
    assert await refusal() is Refusal.NOT_IN_TRANSACTION
    assert await refusal(group_id="none", generation_id=None) is Refusal.NOT_IN_TRANSACTION
    assert await load(groups, "none") is None
    await begun(transactions, "g")
    assert await refusal() is None
    await ended(transactions)
    assert await refusal() is Refusal.NOT_IN_TRANSACTION
    # The groups of the previous transaction are not enlisted in the next.
    await begun(transactions, "another")
    assert await refusal() is Refusal.NOT_IN_TRANSACTION


async def test_each_commit_is_fenced_by_the_group_as_outside_a_transaction(
    offsets: OffsetStore,
    groups: GroupStore,
    transactions: TransactionStore,
    leases: list[CoordinatorLease],
    lease: CoordinatorLease,
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    await save(groups, group("c", group_type="consumer", generation_id=9, members=(member("a", 4),)), leases[0])
    await save(groups, group("e", state="Empty", members=()), leases[0])
    await begun(transactions, "g", "c", "e", "missing", "simple", "fenced")
    stale = dataclasses.replace(lease, lease_epoch=lease.lease_epoch - 1)
    cases = {
        commit(lease, topic): None,
        commit(lease, topic, generation_id=2): Refusal.ILLEGAL_GENERATION,
        commit(lease, topic, generation_id=-1): Refusal.ILLEGAL_GENERATION,
        commit(lease, topic, generation_id=None, partition_index=1): None,
        commit(lease, topic, group_id="e", generation_id=-1): None,
        commit(lease, topic, group_id="e", generation_id=None): None,
        commit(lease, topic, group_id="c", member_id="a", generation_id=4): None,
        commit(lease, topic, group_id="c", member_id="a", generation_id=9): Refusal.STALE_MEMBER_EPOCH,
        commit(lease, topic, group_id="c", member_id="b", generation_id=4): Refusal.UNKNOWN_MEMBER,
        commit(lease, topic, group_id="c", generation_id=None, partition_index=1): None,
        commit(stale, topic): Refusal.NOT_COORDINATOR,
        commit(stale, topic, generation_id=None): Refusal.NOT_COORDINATOR,
        commit(stale, topic, group_id="fenced", generation_id=None): Refusal.NOT_COORDINATOR,
        commit(lease, topic, partition_index=4): Refusal.UNKNOWN_PARTITION,
        commit(lease, topic, group_id="missing", generation_id=0): Refusal.ILLEGAL_GENERATION,
        commit(lease, topic, group_id="simple", generation_id=None): None,
    }
    refusals = await offsets.commit_in_transaction(list(cases), T, PRODUCER, EPOCH)
    assert dict(zip(cases, refusals, strict=True)) == cases
    expected = {("g", 0), ("g", 1), ("e", 0), ("c", 0), ("c", 1), ("simple", 0)}
    assert {(group_id, index) for group_id, index, _ in await pending(sql)} == expected
    simple = await load(groups, "simple")
    assert simple is not None
    assert (simple.state, simple.protocol_type, simple.generation_id, simple.members) == ("Empty", None, 0, ())
    assert await load(groups, "missing") is None
    assert await load(groups, "fenced") is None


async def test_nothing_to_commit(offsets: OffsetStore) -> None:
    assert await offsets.commit_in_transaction([], T, PRODUCER, EPOCH) == []


# --- beside others ------------------------------------------------------------------------------------------------


async def test_the_end_waits_for_offsets_that_are_being_committed(
    database: Database,
    offsets: OffsetStore,
    transactions: TransactionStore,
    lease: CoordinatorLease,
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    await begun(transactions, "g")
    async with database.hot.connection() as held, held.transaction():
        # A commit that has found its transaction open waits for the group here.
        await held.execute("select from consumer_group where group_id = 'g' for update")
        committing = asyncio.create_task(offsets.commit_in_transaction([commit(lease, topic)], T, PRODUCER, EPOCH))
        await until_blocked(sql, 1)
        ending = asyncio.create_task(ended(transactions))
        await until_blocked(sql, 2)
    assert await committing == [None]
    await ending
    assert await committed(offsets) == {0: 42}


async def test_a_commit_while_the_transaction_ends_is_refused(
    database: Database,
    offsets: OffsetStore,
    transactions: TransactionStore,
    lease: CoordinatorLease,
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    await begun(transactions, "g")
    async with database.hot.connection() as held, held.transaction():
        await held.execute("select from consumer_group where group_id = 'g' for update")
        ending = asyncio.create_task(ended(transactions))
        await until_blocked(sql, 1)
        committing = asyncio.create_task(offsets.commit_in_transaction([commit(lease, topic)], T, PRODUCER, EPOCH))
        await until_blocked(sql, 2)
    await ending
    assert await committing == [Refusal.NOT_IN_TRANSACTION]
    assert await pending(sql) == {}


async def test_a_later_commit_outside_the_transaction_wins(
    offsets: OffsetStore, transactions: TransactionStore, lease: CoordinatorLease, topic: Topic, sql: asyncpg.Connection
) -> None:
    """Upstream's test: KeepsTheMostRecentCommittedOffset."""
    await begun(transactions, "g")
    await offsets.commit_in_transaction([commit(lease, topic)], T, PRODUCER, EPOCH)
    await offsets.commit([commit(lease, topic, committed_offset=50)])
    await sql.execute("update committed_offset set commit_timestamp_ms = commit_timestamp_ms + 1")
    await ended(transactions)
    assert await committed(offsets) == {0: 50}


async def test_a_clock_that_was_set_back_costs_no_offsets(
    offsets: OffsetStore, transactions: TransactionStore, lease: CoordinatorLease, topic: Topic, sql: asyncpg.Connection
) -> None:
    await offsets.commit([commit(lease, topic, committed_offset=1, retention_ms=5)])
    await sql.execute("update committed_offset set commit_timestamp_ms = commit_timestamp_ms + 3600000")
    await begun(transactions, "g")
    for value in (2, 3):
        await offsets.commit_in_transaction([commit(lease, topic, committed_offset=value)], T, PRODUCER, EPOCH)
    await ended(transactions)
    assert await committed(offsets) == {0: 3}
    assert await sql.fetchval("select expire_timestamp_ms from committed_offset") is None


async def test_transactions_commit_their_own_offsets(
    offsets: OffsetStore,
    transactions: TransactionStore,
    lease: CoordinatorLease,
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    await begun(transactions, "g")
    await begun(transactions, "g", transactional_id="other", producer_id=PRODUCER + 1)
    await offsets.commit_in_transaction([commit(lease, topic)], T, PRODUCER, EPOCH)
    both = [commit(lease, topic, partition_index=index, committed_offset=9) for index in (0, 1)]
    await offsets.commit_in_transaction(both, "other", PRODUCER + 1, EPOCH)
    await ended(transactions, committed=False, transactional_id="other")
    assert await committed(offsets) == {}
    assert await pending(sql) == {("g", 0, PRODUCER): 42}
    await ended(transactions)
    assert await committed(offsets) == {0: 42}


# --- answers to readers -------------------------------------------------------------------------------------------


async def fetched(
    offsets: OffsetStore, topic: Topic, *, require_stable: bool, whole: bool
) -> list[tuple[int, int, bool]]:
    """Return partition, offset and whether the offset is pending."""
    wanted = [] if whole else [("g", topic.topic_id, index) for index in range(4)]
    found = await offsets.fetch_together(wanted, ["g"] if whole else [], require_stable=require_stable)
    return [(each.partition_index, each.committed_offset, each.is_pending) for _, each in found]


@pytest.mark.parametrize("whole", [False, True])
async def test_a_fetch_of_stable_offsets_reports_pending_ones(
    offsets: OffsetStore, transactions: TransactionStore, lease: CoordinatorLease, topic: Topic, whole: bool
) -> None:
    await offsets.commit([commit(lease, topic, partition_index=index, committed_offset=5) for index in (0, 1)])
    await begun(transactions, "g")
    await begun(transactions, "g", transactional_id="other", producer_id=PRODUCER + 1)
    some = [commit(lease, topic, partition_index=index) for index in (1, 2)]
    await offsets.commit_in_transaction(some, T, PRODUCER, EPOCH)
    await offsets.commit_in_transaction(some[1:], "other", PRODUCER + 1, EPOCH)

    async def told(*, require_stable: bool) -> list[tuple[int, int, bool]]:
        return await fetched(offsets, topic, require_stable=require_stable, whole=whole)

    assert await told(require_stable=False) == [(0, 5, False), (1, 5, False)]
    two = [(2, -1, True)] * 2
    assert await told(require_stable=True) == [(0, 5, False), (1, 5, False), (1, -1, True), *two]
    await ended(transactions)
    assert await told(require_stable=True) == [(0, 5, False), (1, 42, False), (2, 42, False), (2, -1, True)]
    await ended(transactions, committed=False, transactional_id="other")
    assert await told(require_stable=True) == [(0, 5, False), (1, 42, False), (2, 42, False)]


# --- what goes ----------------------------------------------------------------------------------------------------


async def test_deleted_offsets_do_not_return_when_the_transaction_ends(
    offsets: OffsetStore,
    transactions: TransactionStore,
    lease: CoordinatorLease,
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    """Upstream's test: WithPendingTransactionalOffsets."""
    await begun(transactions, "g")
    some = [commit(lease, topic, partition_index=index) for index in (0, 1)]
    await offsets.commit_in_transaction(some, T, PRODUCER, EPOCH)
    await offsets.delete("g", [(topic.topic_id, 0)], lease)
    assert await pending(sql) == {("g", 1, PRODUCER): 42}
    await ended(transactions)
    assert await committed(offsets) == {1: 42}


async def test_a_deletion_happens_before_or_after_the_end_of_a_transaction(
    database: Database,
    offsets: OffsetStore,
    transactions: TransactionStore,
    lease: CoordinatorLease,
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    await offsets.commit([commit(lease, topic, committed_offset=1)])
    await begun(transactions, "g")
    await offsets.commit_in_transaction([commit(lease, topic)], T, PRODUCER, EPOCH)
    async with database.hot.connection() as held, held.transaction():
        await held.execute("select from committed_offset for update")
        deleting = asyncio.create_task(offsets.delete("g", [(topic.topic_id, 0)], lease))
        await until_blocked(sql, 1)
        ending = asyncio.create_task(ended(transactions))
        await until_blocked(sql, 2)
    await asyncio.gather(deleting, ending)
    assert await committed(offsets) == {}


async def test_a_deleted_group_loses_its_pending_offsets(
    offsets: OffsetStore,
    groups: GroupStore,
    transactions: TransactionStore,
    lease: CoordinatorLease,
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    """Upstream's test: DeleteGroupAllOffsets, which also deletes pending offsets. A group that is created again begins
    with none."""
    await save(groups, group("h"), lease)
    await begun(transactions, "g", "h")
    some = [commit(lease, topic, group_id=group_id) for group_id in "gh"]
    await offsets.commit_in_transaction(some, T, PRODUCER, EPOCH)
    assert await groups.delete("g", lease)
    assert await pending(sql) == {("h", 0, PRODUCER): 42}
    await save(groups, group("g"), lease)
    await ended(transactions)
    assert await committed(offsets) == {}
    assert await committed(offsets, "h") == {0: 42}


async def test_a_group_with_many_pending_offsets_is_deleted_in_bounded_steps(
    transactions: TransactionStore, lease: CoordinatorLease, topic: Topic, sql: asyncpg.Connection
) -> None:
    await sql.execute(
        "insert into pending_offset select 'g', $1, i, 1, 1, -1, '', 0 from generate_series(1, 5) i", topic.topic_id
    )
    outcomes = [
        await sql.fetchval("select delete_group('g', $1, $2, $3, 2)", lease.shard, lease.node_id, lease.lease_epoch)
        for _ in range(3)
    ]
    assert outcomes == ["more", "more", "deleted"]
    assert await pending(sql) == {}


async def test_an_offset_that_an_open_transaction_will_replace_does_not_expire(
    offsets: OffsetStore,
    groups: GroupStore,
    transactions: TransactionStore,
    lease: CoordinatorLease,
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    """Pending offsets are retained."""
    await offsets.commit([commit(lease, topic, partition_index=index) for index in (0, 1)])
    await begun(transactions, "g")
    some = [commit(lease, topic, partition_index=index) for index in (0, 2)]
    await offsets.commit_in_transaction(some, T, PRODUCER, EPOCH)
    await save(groups, group("g", state="Empty", members=()), lease)
    await sql.execute("update consumer_group set state_timestamp_ms = 5")

    async def expired() -> ExpiredOffsets:
        return await offsets.expire(lease, DAY_MS, KnownGroups)

    assert await expired() == ExpiredOffsets(1, ())
    assert await committed(offsets) == {0: 42}
    assert await expired() == ExpiredOffsets(0, ())
    await sql.execute("delete from committed_offset where partition_index = 0")
    await sql.execute("delete from pending_offset where partition_index = 0")
    await offsets.commit([commit(lease, topic, generation_id=-1, partition_index=1, retention_ms=0)])
    assert await expired() == ExpiredOffsets(1, ())
    await offsets.commit([commit(lease, topic, generation_id=-1, retention_ms=0)])
    await ended(transactions, committed=False)
    assert await expired() == ExpiredOffsets(1, ("g",))


async def test_an_empty_group_with_pending_offsets_is_not_removed(
    offsets: OffsetStore,
    groups: GroupStore,
    transactions: TransactionStore,
    lease: CoordinatorLease,
    topic: Topic,
) -> None:
    """The group has pending offsets only."""
    await begun(transactions, "simple")
    await offsets.commit_in_transaction(
        [commit(lease, topic, group_id="simple", generation_id=None)], T, PRODUCER, EPOCH
    )
    await save(groups, group("without", state="Empty", members=()), lease)
    # The limit is one group at a time. A group with pending offsets must not keep others from their turn.
    expired = await offsets.expire(lease, 0, lambda: KnownGroups({}, ["g"]), group_limit=1)
    assert expired == ExpiredOffsets(0, ("without",))
    await ended(transactions)
    assert await committed(offsets, "simple") == {0: 42}


async def test_pending_offsets_are_removed_with_their_topic(
    database: Database,
    offsets: OffsetStore,
    transactions: TransactionStore,
    lease: CoordinatorLease,
    topic: Topic,
    topics: TopicStore,
    make_topic: MakeTopic,
    sql: asyncpg.Connection,
) -> None:
    other = await make_topic("payments")
    await begun(transactions, "g")
    some = [commit(lease, topic), commit(lease, other)]
    await offsets.commit_in_transaction(some, T, PRODUCER, EPOCH)
    await topics.delete(topic.topic_id)
    found = await offsets.fetch_together([("g", topic.topic_id, 0)], ["g"], require_stable=True)
    assert [each.topic_id for _, each in found] == [other.topic_id]
    refused = await offsets.commit_in_transaction([commit(lease, topic)], T, PRODUCER, EPOCH)
    assert refused == [Refusal.UNKNOWN_TOPIC]
    assert (await DeletionStore(database).advance(topic.topic_id)).gone
    assert await sql.fetch("select topic_id from pending_offset") == [(other.topic_id,)]
    await ended(transactions)
    assert [each.topic_id for each in await offsets.fetch("g")] == [other.topic_id]


async def test_the_end_of_a_transaction_skips_topics_in_deletion(
    offsets: OffsetStore,
    transactions: TransactionStore,
    lease: CoordinatorLease,
    topic: Topic,
    topics: TopicStore,
    sql: asyncpg.Connection,
) -> None:
    await begun(transactions, "g")
    await offsets.commit_in_transaction([commit(lease, topic)], T, PRODUCER, EPOCH)
    await topics.delete(topic.topic_id)
    await ended(transactions)
    assert await sql.fetchval("select count(*) from committed_offset") == 0
    assert await pending(sql) == {}


async def test_overlapping_transactions_do_not_deadlock(
    database_url: str,
    groups: GroupStore,
    leases: list[CoordinatorLease],
    topic: Topic,
    sql: asyncpg.Connection,
) -> None:
    """Transactions begin, commit offsets and end, beside other commits, rebalances and deletions of the same groups."""
    names = [f"g{i}" for i in range(4)]
    for i, name in enumerate(names):
        await save(groups, group(name), leases[i % 3])
    databases = [await Database.open(database_url, hot_connections=1, cold_connections=1) for _ in range(4)]

    def commits(turn: int, **changes: object) -> list[OffsetCommit]:
        order: Callable[[list[int]], list[int]] = sorted if turn % 2 else lambda given: sorted(given, reverse=True)
        return [
            commit(leases[i % 3], topic, group_id=names[i], partition_index=index, committed_offset=turn, **changes)
            for i in order([0, 1, 2, 3])
            for index in order([0, 1, 2, 3])
        ]

    async def transact(database: Database, number: int) -> None:
        store, own = TransactionStore(database), f"t{number}"
        for turn in range(15):
            await begun(store, *names, transactional_id=own, producer_id=number)
            refusals = await OffsetStore(database).commit_in_transaction(commits(turn), own, number, EPOCH)
            assert refusals == [None] * 16
            await ended(store, committed=turn % 3 > 0, transactional_id=own)

    async def outside(database: Database) -> None:
        for turn in range(15):
            assert await OffsetStore(database).commit(commits(turn)) == [None] * 16
            await save(GroupStore(database), group(names[turn % 4], document={"i": turn}), leases[turn % 4 % 3])
            partitions = [(topic.topic_id, index) for index in (3, 1)]
            await OffsetStore(database).delete(names[turn % 4], partitions, leases[turn % 4 % 3])

    try:
        *producers, other = databases
        await asyncio.gather(*(transact(database, i) for i, database in enumerate(producers)), outside(other))
    finally:
        for database in databases:
            await database.close()
    assert await sql.fetchval("select deadlocks from pg_stat_database where datname = current_database()") == 0
    assert await pending(sql) == {}


@pytest.fixture
async def now_ms(sql: asyncpg.Connection) -> int:
    return int(await sql.fetchval("select (extract(epoch from clock_timestamp()) * 1000)::bigint") or 0)
