"""Transactions that end in several steps: what readers see between them, which node completes them, and bounds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from gateway.apis.transactions.lifecycle import refuse_add_offsets_to_txn, refuse_add_partitions_to_txn
from gateway.apis.transactions.transaction_admin import describe_transactions
from gateway.coordinator.transactions import EXHAUSTED_FROM_EPOCH, InitProducer, Producer
from gateway.internal_log.sources import TransactionSource
from gateway.transactions.coordinator import Transactions
from protocol.api_keys import ApiKey
from protocol.coordinator_records import TRANSACTION, decode_value
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest, AddPartitionsToTxnTopic
from protocol.messages.describe_transactions import DescribeTransactionsRequest
from protocol.records import Record, build_batch
from storage.errors import StorageError, StorageUnavailable
from storage.transactions import MAX_SIZE, EndedTransaction, ProducerRecord, StoredProducer, TransactionStore
from storage.types import Appended, NewBatch, PartitionKey, Topic
from tests.gateway.data_plane import DataPlane, Hears, data_plane, offsets_in

PARTITIONS, AT_A_TIME = 12, 5
MAX_HELD_S = 2.0
"""Seconds that an append may wait while the largest transaction ends. Without such an end it takes milliseconds."""


@pytest.fixture
async def node(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url) as node:
        yield node


@pytest.fixture
async def topic(node: DataPlane) -> Topic:
    return await node.create_topic("t", PARTITIONS + 3)


@pytest.fixture
def transactions(node: DataPlane) -> Transactions:
    return small(node)


def small(node: DataPlane) -> Transactions:
    """Return a coordinator for which transactions with more than five partitions are large, and those with more than
    twelve are too large.
    """
    store = TransactionStore(node.database, max_size=PARTITIONS, marked_at_a_time=AT_A_TIME)
    return Transactions(
        store,
        node.services.producers,
        node.tail,
        node.membership,
        overdue_at_a_time=2,
        first_delay_s=3_600.0,
        listener=node.markers,
    )


def keys_of(topic: Topic, first: int = 0, last: int = PARTITIONS) -> list[PartitionKey]:
    return [part.partition_key for part in topic.partitions[first:last]]


async def begin(transactions: Transactions, name: str, keys: list[PartitionKey]) -> Producer:
    producer = await transactions.initialize(name, InitProducer(60_000))
    await transactions.add(name, producer.producer_id, producer.producer_epoch, keys)
    return producer


async def write_all(node: DataPlane, producer: Producer, keys: list[PartitionKey]) -> None:
    records = build_batch(
        [Record(number, 1_000, None, b"v") for number in range(2)],
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        base_sequence=0,
        is_transactional=True,
    )
    identity = (producer.producer_id, producer.producer_epoch, 0)
    outcomes = [
        node.appender.submit(NewBatch(key, bytearray(records), 2, 1_000, *identity, is_transactional=True))
        for key in keys
    ]
    assert all(isinstance(outcome, Appended) for outcome in await asyncio.gather(*outcomes))


async def seen(node: DataPlane, topic: Topic, partition: int) -> tuple[list[int], bool]:
    """Return the offsets that a read_committed reader gets, including the marker, and whether the answer lists aborted
    transactions.
    """
    node.tail.reset()
    part = await node.fetch_one(topic, 0, partition=partition, isolation_level=1)
    return offsets_in(part), bool(part.aborted_transactions)


async def shift(database_url: str, seconds: int, name: str = "%") -> None:
    """Let time pass for the transactions whose ids match (LIKE)."""
    sql = await asyncpg.connect(database_url)
    try:
        await sql.execute(
            "update sluice.transactional_producer set started_at = started_at - $1 * interval '1 second',"
            " updated_at = updated_at - $1 * interval '1 second' where transactional_id like $2",
            seconds,
            name,
        )
    finally:
        await sql.close()


def refuse_ends(transactions: Transactions, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Let ends of these transactional ids fail. Return the list of attempts."""
    end = transactions.store.end
    attempts: list[str] = []

    async def refuse(
        read: StoredProducer, record: ProducerRecord, marker: bytes, *, committed: bool, timestamp_ms: int
    ) -> EndedTransaction | None:
        attempts.append(read.transactional_id)
        if read.transactional_id in names:
            raise StorageError("it cannot be ended")
        return await end(read, record, marker, committed=committed, timestamp_ms=timestamp_ms)

    monkeypatch.setattr(transactions.store, "end", refuse)
    return attempts


async def test_too_large_transaction_enlists_nothing(node: DataPlane, transactions: Transactions, topic: Topic) -> None:
    producer = await begin(transactions, "a", keys_of(topic, 0, PARTITIONS - 2))
    identity = ("a", producer.producer_id, producer.producer_epoch)
    for named in (True, False):
        with pytest.raises(KafkaError) as refused:
            await transactions.add(*identity, keys_of(topic, PARTITIONS - 2, PARTITIONS + 1), named=named)
        assert refused.value.code is ErrorCode.TRANSACTION_ABORTABLE
    assert await transactions.taken_in_by(*identity) == frozenset(keys_of(topic, 0, PARTITIONS - 2))
    await transactions.add(*identity, [*keys_of(topic, 3, PARTITIONS - 1)] * 2)
    await transactions.add(*identity, group_ids=["g", "g"])
    for keys, group_ids in ([], ["h"]), (keys_of(topic, PARTITIONS - 1, PARTITIONS), []):
        with pytest.raises(KafkaError) as refused:
            await transactions.add(*identity, keys, group_ids)
        assert refused.value.code is ErrorCode.TRANSACTION_ABORTABLE
    await transactions.add(*identity, keys_of(topic, 0, PARTITIONS - 1), group_ids=["g"])
    await transactions.end(*identity, committed=False)
    await transactions.add(*identity, keys_of(topic))


@pytest.mark.parametrize("version", range(5))
def test_a_transaction_that_would_be_too_large_is_refused_by_a_code_of_the_version(version: int) -> None:
    """Clients do not retry after either code. The code of newer versions asks them to abort the transaction and
    continue."""
    code = ErrorCode.TRANSACTION_ABORTABLE if version >= 4 else ErrorCode.POLICY_VIOLATION
    offsets = AddOffsetsToTxnRequest(transactional_id="a", producer_id=1, producer_epoch=0, group_id="g")
    told: Any = refuse_add_offsets_to_txn(offsets, version, ErrorCode.TRANSACTION_ABORTABLE, None)
    assert told.error_code == code
    if version < 4:
        topics = (AddPartitionsToTxnTopic(name="t", partitions=(0, 1)),)
        partitions = AddPartitionsToTxnRequest(v3_and_below_topics=topics)
        (topic,) = refuse_add_partitions_to_txn(
            partitions, version, ErrorCode.TRANSACTION_ABORTABLE, None
        ).results_by_topic_v3_and_below
        assert [part.partition_error_code for part in topic.results_by_partition] == [code, code]


@pytest.mark.parametrize("raise_epoch", [False, True])
@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("size", [AT_A_TIME, AT_A_TIME + 1, PARTITIONS])
async def test_a_transaction_of_any_size_ends_in_every_partition(
    node: DataPlane, transactions: Transactions, topic: Topic, size: int, *, committed: bool, raise_epoch: bool
) -> None:
    told: list[PartitionKey] = []
    node.markers.listener = Hears(lambda key, _: told.append(key))
    keys = keys_of(topic, 0, size)
    producer = await begin(transactions, "a", keys)
    await write_all(node, producer, keys)
    after = await transactions.end("a", producer.producer_id, 0, committed=committed, raise_epoch=raise_epoch)
    assert after.producer_epoch == int(raise_epoch)
    assert after.state == ("CompleteCommit" if committed else "CompleteAbort")
    assert sorted(told) == sorted(keys)
    for partition in range(size):
        assert await seen(node, topic, partition) == ([0, 1, 2], not committed)
    read = await transactions.store.read("a")
    assert (read.ending, read.started_ms) == (None, None)
    assert read.last_started_ms is not None
    again = await transactions.end("a", producer.producer_id, 0, committed=committed, raise_epoch=raise_epoch)
    assert again == after


@pytest.mark.parametrize("completed_by", ["its producer", "its producer that changed its mind", "the next", "the job"])
@pytest.mark.parametrize("committed", [True, False])
async def test_an_end_that_fails_half_way_keeps_its_outcome(
    node: DataPlane,
    transactions: Transactions,
    topic: Topic,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    completed_by: str,
    *,
    committed: bool,
) -> None:
    keys = keys_of(topic)
    producer = await begin(transactions, "a", keys)
    identity = ("a", producer.producer_id, producer.producer_epoch)
    await write_all(node, producer, keys)

    async def lost(_read: StoredProducer) -> EndedTransaction | None:
        raise StorageUnavailable("Postgres is away")

    monkeypatch.setattr(transactions.store, "continue_end", lost)
    with pytest.raises(StorageUnavailable):
        await transactions.end(*identity, committed=committed)
    prepared = await transactions.store.read("a")
    assert prepared.record is not None
    assert prepared.record.state == ("PrepareCommit" if committed else "PrepareAbort")
    views = [await seen(node, topic, partition) for partition in range(PARTITIONS)]
    assert views == [([0, 1, 2], not committed)] * AT_A_TIME + [([], False)] * (PARTITIONS - AT_A_TIME)
    another = small(node)
    for asked in (another.add(*identity, keys), another.taken_in_by(*identity)):
        with pytest.raises(KafkaError) as refused:
            await asked
        assert refused.value.code is ErrorCode.CONCURRENT_TRANSACTIONS

    match completed_by:
        case "its producer":
            await another.end(*identity, committed=committed)
        case "its producer that changed its mind":
            with pytest.raises(KafkaError) as refused:
                await another.end(*identity, committed=not committed)
            assert refused.value.code is ErrorCode.INVALID_TXN_STATE
        case "the next":
            assert (await another.initialize("a", InitProducer(60_000))).producer_epoch == 1
        case _:
            assert await another.abort_overdue() == 0, "somebody may still be at it"
            await shift(database_url, 3)
            assert await another.abort_overdue() == 1
    views = [await seen(node, topic, partition) for partition in range(PARTITIONS)]
    assert views == [([0, 1, 2], not committed)] * PARTITIONS
    assert (await another.store.read("a")).ending is None


async def test_partitions_left_to_mark_are_shown_if_the_epochs_of_their_producer_id_are_used_up(
    node: DataPlane, transactions: Transactions, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await begin(transactions, "a", [])
    await node.database.hot.fetch(
        "update transactional_producer set producer_epoch = $1 where transactional_id = 'a'", EXHAUSTED_FROM_EPOCH
    )
    await transactions.add("a", producer.producer_id, EXHAUSTED_FROM_EPOCH, keys_of(topic))

    async def lost(_read: StoredProducer) -> EndedTransaction | None:
        raise StorageUnavailable("Postgres is away")

    monkeypatch.setattr(transactions.store, "continue_end", lost)
    with pytest.raises(StorageUnavailable):
        await transactions.end("a", producer.producer_id, EXHAUSTED_FROM_EPOCH, committed=True, raise_epoch=True)
    left = tuple(range(AT_A_TIME, PARTITIONS))
    asked = DescribeTransactionsRequest(transactional_ids=("a",))
    answer = await describe_transactions(asked, node.context(ApiKey.DESCRIBE_TRANSACTIONS, 0))
    (state,) = answer.transaction_states
    assert state.producer_id != producer.producer_id
    assert [(each.topic, each.partitions) for each in state.topics] == [("t", left)]
    (owned,) = [each async for each in TransactionSource(transactions, lambda: 1).read(["a"])]
    assert owned.now is not None
    ((_, value),) = [entry async for entry in owned.now]
    assert isinstance(value, bytes)
    _, record = decode_value(TRANSACTION, value)
    assert [(each.topic, each.partition_ids) for each in record.transaction_partitions] == [("t", left)]


async def test_concurrent_completions_mark_each_partition_once(
    node: DataPlane, transactions: Transactions, topic: Topic
) -> None:
    keys = keys_of(topic)
    producer = await begin(transactions, "a", keys)
    await write_all(node, producer, keys)
    another = small(node)
    ends = (one.end("a", producer.producer_id, 0, committed=True) for one in (transactions, another, transactions))
    await asyncio.gather(*ends)
    for partition in range(PARTITIONS):
        assert await seen(node, topic, partition) == ([0, 1, 2], False)


async def test_overdue_transactions_that_cannot_end_come_last(
    node: DataPlane, transactions: Transactions, topic: Topic, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"id-{number}" for number in range(7)]
    for name in names:
        await begin(transactions, name, keys_of(topic, 0, 1))
    await shift(database_url, 3_600)
    attempts = refuse_ends(transactions, monkeypatch, *names[:5])
    with pytest.raises(StorageError):
        await transactions.abort_overdue()
    assert attempts == names, "all of them are looked at, not only those of the first page"
    assert [each.transactional_id for each in await transactions.store.overdue(10)] == names[:5]
    await begin(transactions, "another", keys_of(topic, 0, 1))
    await shift(database_url, 3_600, "another")
    attempts.clear()
    assert await transactions.abort_overdue() == 1
    assert attempts == ["another"]


async def test_overdue_transactions_that_could_not_be_ended_are_tried_again(
    node: DataPlane, topic: Topic, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = Transactions(
        TransactionStore(node.database), node.services.producers, node.tail, node.membership, first_delay_s=0.0
    )
    for name in ("first", "second"):
        await begin(transactions, name, keys_of(topic, 0, 1))
    await shift(database_url, 3_600)
    with monkeypatch.context() as patched:
        refuse_ends(transactions, patched, "first")
        with pytest.raises(StorageError):
            await transactions.abort_overdue()
    assert await transactions.abort_overdue() == 1
    assert await transactions.store.overdue(10) == []


async def test_end_of_the_largest_transaction_delays_appends_briefly(node: DataPlane) -> None:
    wide = await node.create_topic("wide", MAX_SIZE)
    other = await node.create_topic("other")
    keys = keys_of(wide, 0, MAX_SIZE)
    transactions = node.transactions
    producer = await begin(transactions, "a", keys)
    ending = asyncio.create_task(
        transactions.end("a", producer.producer_id, 0, committed=True, raise_epoch=True), name="ending"
    )
    slowest_s = 0.0
    appended = 0
    while not ending.done():
        for topic, partition in ((wide, MAX_SIZE - 1), (wide, 0), (other, 0)):
            began_s = time.monotonic()
            await node.fill(topic, [100], partition=partition)
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            appended += 1
    assert (await ending).producer_epoch == 1
    assert slowest_s < MAX_HELD_S
    assert appended > 3
    states = await node.log.states(keys)
    assert all(state.high_watermark == state.last_stable_offset for state in states.values())
    assert sum(state.high_watermark for state in states.values()) >= MAX_SIZE


async def test_overdue_transaction_without_room_in_memory_is_tried_again_at_once(
    node: DataPlane, topic: Topic, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node can remember one failed transaction. Another transaction, which failed later, uses that room."""
    transactions = Transactions(
        TransactionStore(node.database), node.services.producers, node.tail, node.membership, max_failed=1
    )
    await begin(transactions, "first", keys_of(topic, 0, 1))
    await shift(database_url, 7_200)
    with monkeypatch.context() as patched:
        attempts = refuse_ends(transactions, patched, "first", "second")
        with pytest.raises(StorageError):
            await transactions.abort_overdue()
        await begin(transactions, "second", keys_of(topic, 0, 1))
        await shift(database_url, 3_600, "second")
        attempts.clear()
        with pytest.raises(StorageError):
            await transactions.abort_overdue()
        assert attempts == ["second", "first"]
