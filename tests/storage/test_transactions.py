"""Transactions in Postgres: which appends belong to one, the single step that ends it, and what readers see."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from storage.log import LogStore
from storage.pool import Database
from storage.producers import ProducerStore
from storage.topics import TopicStore
from storage.transactions import EndedTransaction, ProducerRecord, TransactionStore
from storage.types import (
    AbortedTransaction,
    Appended,
    NewBatch,
    PartitionKey,
    ReadRequest,
    ReadResult,
    Refusal,
)
from tests.steps.waiting import until_blocked
from tests.storage.batches import append, batch_bytes, new_batch, read
from tests.storage.conftest import MakeLog, MakeTopic
from tests.storage.transactions import Producer, committed_records, plain_batch

FIRST = ProducerRecord(
    producer_id=4000,
    producer_epoch=0,
    last_producer_epoch=-1,
    previous_producer_id=-1,
    timeout_ms=60_000,
    state="Empty",
)
SECOND = replace(FIRST, producer_id=4001)


@pytest.fixture
def transactions(database: Database) -> TransactionStore:
    return TransactionStore(database)


def transactional(
    key: PartitionKey, sequence: int, producer: ProducerRecord = FIRST, *, records: int = 1, epoch: int | None = None
) -> NewBatch:
    chosen = producer.producer_epoch if epoch is None else epoch
    batch = new_batch(key, records=records, producer=(producer.producer_id, chosen, sequence))
    return batch._replace(is_transactional=True)


async def begin(
    transactions: TransactionStore,
    name: str,
    producer: ProducerRecord,
    *keys: PartitionKey,
    groups: tuple[str, ...] = (),
) -> None:
    read = await transactions.read(name)
    if read.record is None:
        assert await transactions.save(read, producer)
        read = await transactions.read(name)
    assert await transactions.add(read, keys, groups)


async def end(transactions: TransactionStore, name: str, *, committed: bool) -> EndedTransaction:
    read = await transactions.read(name)
    assert read.record is not None
    state = "CompleteCommit" if committed else "CompleteAbort"
    ended = await transactions.end(
        read, replace(read.record, state=state), marker(), committed=committed, timestamp_ms=2_000
    )
    assert ended is not None
    markers = [*ended.markers]
    while (read := await transactions.read(name)).ending is not None:
        step = await transactions.continue_end(read)
        assert step is not None
        markers += step.markers
    return replace(ended, markers=tuple(markers))


def marker() -> bytes:
    """Make a marker. To storage it is a batch of one offset."""
    return bytes(batch_bytes(78, 1, 2_000))


async def read_committed(log: LogStore, key: PartitionKey, offset: int = 0, max_bytes: int = 10**6) -> ReadResult:
    (result,) = await log.read([ReadRequest(key, offset, max_bytes, committed=True)], max_bytes=max_bytes)
    assert isinstance(result, ReadResult)
    return result


def base_offsets(result: ReadResult) -> list[int]:
    return [batch.base_offset for batch in result.batches]


async def test_records_behind_the_start_of_an_open_transaction_are_not_stable(
    log: LogStore, key: PartitionKey, transactions: TransactionStore
) -> None:
    await append(log, new_batch(key, records=2))
    await begin(transactions, "a", FIRST, key)
    assert (await read(log, key)).state.last_stable_offset == 2, "it has written nothing yet"
    (first,) = await log.append([transactional(key, 0)])
    (plain,) = await log.append([new_batch(key)], wait=False)
    assert isinstance(first, Appended)
    assert isinstance(plain, Appended)
    assert (first.open_since_offset, plain.open_since_offset) == (2, 2)
    result = await read_committed(log, key)
    assert base_offsets(result) == [0]
    assert (result.state.last_stable_offset, result.state.high_watermark) == (2, 4)
    assert (await log.states([key]))[key].last_stable_offset == 2
    assert [batch.base_offset for batch in (await read(log, key)).batches] == [0, 2, 3]

    ended = await end(transactions, "a", committed=True)
    (marked,) = ended.markers
    assert (marked.base_offset, marked.last_stable_offset, marked.first_offset) == (4, 5, 2)
    result = await read_committed(log, key)
    assert base_offsets(result) == [0, 2, 3, 4]
    assert result.aborted == ()
    assert result.state.last_stable_offset == 5
    (after,) = await log.append([new_batch(key)], wait=False)
    assert isinstance(after, Appended)
    assert after.open_since_offset is None


async def test_the_earliest_open_transaction_bounds_the_last_stable_offset(
    log: LogStore, key: PartitionKey, transactions: TransactionStore
) -> None:
    await begin(transactions, "a", FIRST, key)
    await begin(transactions, "b", SECOND, key)
    await log.append([transactional(key, 0, SECOND), transactional(key, 0, FIRST), transactional(key, 1, SECOND)])
    (ended,) = (await end(transactions, "b", committed=True)).markers
    assert (ended.base_offset, ended.last_stable_offset, ended.first_offset) == (3, 1, 0)
    assert base_offsets(await read_committed(log, key)) == [0]
    (ended,) = (await end(transactions, "a", committed=True)).markers
    assert (ended.base_offset, ended.last_stable_offset, ended.first_offset) == (4, 5, 1)


async def test_a_read_returns_the_aborted_transactions_of_its_range(
    log: LogStore, key: PartitionKey, transactions: TransactionStore
) -> None:
    """Offsets: 0 aborted, 1 marker, 2 committed, 3 marker, 4 aborted (both producers), 5, 6 and 7 markers."""
    for sequence, committed in enumerate((False, True)):
        await begin(transactions, "a", FIRST, key)
        await log.append([transactional(key, sequence)])
        await end(transactions, "a", committed=committed)
    await begin(transactions, "a", FIRST, key)
    await begin(transactions, "b", SECOND, key)
    await log.append([transactional(key, 2), transactional(key, 0, SECOND)])
    await end(transactions, "b", committed=False)
    assert base_offsets(await read_committed(log, key)) == [0, 1, 2, 3]
    await end(transactions, "a", committed=False)

    everything = await read_committed(log, key)
    assert base_offsets(everything) == list(range(8))
    assert everything.aborted == (
        AbortedTransaction(4000, 0),
        AbortedTransaction(4000, 4),
        AbortedTransaction(4001, 5),
    )
    assert (await read_committed(log, key, 1)).aborted == everything.aborted, "the marker at 1 ends it"
    assert (await read_committed(log, key, 2)).aborted == everything.aborted[1:]
    assert (await read_committed(log, key, 7)).aborted == (AbortedTransaction(4000, 4),)
    short = await read_committed(log, key, 0, max_bytes=100)
    assert base_offsets(short) == [0]
    assert short.aborted == (AbortedTransaction(4000, 0),)
    assert (await read(log, key)).aborted == (), "who reads everything is told nothing"


async def test_a_transactional_batch_outside_its_transaction_is_refused(
    log: LogStore, key: PartitionKey, make_topic: MakeTopic, transactions: TransactionStore
) -> None:
    assert await log.append([transactional(key, 0)]) == [Refusal.NOT_IN_TRANSACTION], "nobody knows the producer"
    (elsewhere,) = (await make_topic("elsewhere")).partitions
    await begin(transactions, "a", FIRST, elsewhere.partition_key)
    assert await log.append([transactional(key, 0)]) == [Refusal.NOT_IN_TRANSACTION], "another partition"
    await begin(transactions, "a", FIRST, key)
    assert await log.append([transactional(key, 0, epoch=1)]) == [Refusal.NOT_IN_TRANSACTION], "an epoch to come"
    assert isinstance((await log.append([transactional(key, 0)]))[0], Appended)
    await end(transactions, "a", committed=True)
    assert await log.append([transactional(key, 1)]) == [Refusal.NOT_IN_TRANSACTION], "behind the marker"
    assert await log.append([transactional(key, 0)]) == [Refusal.NOT_IN_TRANSACTION], "its first batch once more"
    await begin(transactions, "a", FIRST, key)
    (again,) = await log.append([transactional(key, 0)])
    assert isinstance(again, Appended)
    assert again.duplicate, "in the next transaction of the same epoch it is there already"


async def test_a_producer_id_with_exhausted_epochs_is_fenced_where_it_wrote(
    log: LogStore, key: PartitionKey, make_topic: MakeTopic, transactions: TransactionStore
) -> None:
    (elsewhere,) = (await make_topic("elsewhere")).partitions
    await begin(transactions, "a", FIRST, key)
    await log.append([transactional(key, 0)])
    replaced = replace(FIRST, producer_id=FIRST.producer_id + 500, previous_producer_id=FIRST.producer_id)
    read = await transactions.read("a")
    assert await transactions.end(read, replaced, marker(), committed=False, timestamp_ms=2_000) is not None
    assert await log.append([transactional(key, 1)]) == [Refusal.INVALID_PRODUCER_EPOCH]
    assert await log.append([transactional(elsewhere.partition_key, 0)]) == [Refusal.NOT_IN_TRANSACTION]


async def test_a_fenced_epoch_is_refused_as_fenced(
    log: LogStore, key: PartitionKey, transactions: TransactionStore
) -> None:
    await begin(transactions, "a", FIRST, key)
    await log.append([transactional(key, 0)])
    read = await transactions.read("a")
    fenced = replace(FIRST, producer_epoch=1)
    assert await transactions.end(read, fenced, marker(), committed=False, timestamp_ms=2_000) is not None
    assert await log.append([transactional(key, 1)]) == [Refusal.INVALID_PRODUCER_EPOCH]
    await begin(transactions, "a", fenced, key)
    assert await log.append([transactional(key, 1)]) == [Refusal.INVALID_PRODUCER_EPOCH], "the next is under way"
    assert isinstance((await log.append([transactional(key, 0, fenced)]))[0], Appended)


async def test_a_plain_batch_of_a_producer_with_an_open_transaction_is_refused(
    log: LogStore, key: PartitionKey, transactions: TransactionStore
) -> None:
    await begin(transactions, "a", FIRST, key)
    await log.append([transactional(key, 0)])
    plain = new_batch(key, producer=(4000, 0, 1))
    assert await log.append([plain]) == [Refusal.INVALID_TXN_STATE]
    other = new_batch(key, producer=(4002, 0, 0))
    assert isinstance((await log.append([other]))[0], Appended), "another producer does"
    await end(transactions, "a", committed=True)
    assert isinstance((await log.append([plain]))[0], Appended)


async def test_every_enlisted_partition_receives_a_marker(
    log: LogStore, make_topic: MakeTopic, transactions: TransactionStore, topics: TopicStore
) -> None:
    keys = [part.partition_key for part in (await make_topic("many", 3)).partitions]
    gone = await make_topic("gone")
    await begin(transactions, "a", FIRST, *reversed(keys), gone.partitions[0].partition_key)
    await begin(transactions, "a", FIRST, keys[0])
    await log.append([transactional(keys[1], 0)])
    assert await topics.delete(gone.topic_id)
    ended = await end(transactions, "a", committed=False)
    assert [(each.partition_key, each.base_offset, each.first_offset) for each in ended.markers] == [
        (keys[0], 0, None),
        (keys[1], 1, 0),
        (keys[2], 0, None),
    ]
    assert [(await read_committed(log, key)).aborted for key in keys] == [(), (AbortedTransaction(4000, 0),), ()]
    for key, each in zip(keys, ended.markers, strict=True):
        assert (await read(log, key)).batches[-1].records == each.records


async def test_an_end_decided_by_an_outdated_row_writes_nothing(
    log: LogStore, key: PartitionKey, transactions: TransactionStore
) -> None:
    nobody = await transactions.read("a")
    assert (nobody.revision, nobody.record) == (0, None)
    assert await transactions.save(nobody, FIRST)
    assert not await transactions.save(nobody, SECOND)
    empty = await transactions.read("a")
    assert await transactions.add(empty, [key])
    assert not await transactions.add(empty, [key])
    assert not await transactions.save(empty, replace(FIRST, producer_epoch=1))
    complete = replace(FIRST, state="CompleteCommit")
    assert await transactions.end(empty, complete, marker(), committed=True, timestamp_ms=0) is None
    ongoing = await transactions.read("a")
    assert ongoing.record is not None
    assert ongoing.record.state == "Ongoing"
    assert ongoing.started_ms is not None
    assert not await transactions.save(ongoing, complete), "it has a transaction to end first"
    assert await transactions.end(ongoing, complete, marker(), committed=True, timestamp_ms=0) is not None
    assert await transactions.end(ongoing, complete, marker(), committed=True, timestamp_ms=0) is None
    assert (await read(log, key)).state.high_watermark == 1, "one marker"


@pytest.mark.parametrize("end_first", [False, True])
async def test_an_append_and_the_end_of_its_transaction_never_pass_each_other(
    database_url: str,
    log: LogStore,
    key: PartitionKey,
    transactions: TransactionStore,
    sql: asyncpg.Connection,
    end_first: bool,
) -> None:
    """The append and the end wait for the partition's lock and receive it in order of arrival, so no record of the
    transaction is behind its marker."""
    await begin(transactions, "a", FIRST, key)
    await log.append([transactional(key, 0)])
    watcher = await asyncpg.connect(database_url)
    try:
        async with sql.transaction():
            await sql.execute("select from partition where partition_key = $1 for update", key)

            async def start(waiting: int, *, ends: bool) -> asyncio.Task[Any]:
                work = end(transactions, "a", committed=False) if ends else log.append([transactional(key, 1)])
                task = asyncio.ensure_future(work)
                await until_blocked(watcher, waiting)
                return task

            tasks = [await start(1, ends=end_first), await start(2, ends=not end_first)]
        ended, (outcome,) = [await task for task in (tasks if end_first else reversed(tasks))]
    finally:
        await watcher.close()
    (marked,) = ended.markers
    if end_first:
        assert outcome is Refusal.NOT_IN_TRANSACTION
        assert marked.base_offset == 1
    else:
        assert isinstance(outcome, Appended)
        assert (outcome.base_offset, marked.base_offset) == (1, 2)
    assert (await log.states([key]))[key].last_stable_offset == marked.base_offset + 1


async def test_overdue_transactions_are_found_by_the_databases_clock(
    transactions: TransactionStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await begin(transactions, "slow", FIRST, key)
    await begin(transactions, "slower", SECOND, key)
    assert await transactions.overdue(10) == []
    await sql.execute("update transactional_producer set started_at = now() - interval '61 s'")
    await sql.execute(
        "update transactional_producer set started_at = now() - interval '62 s' where transactional_id = 'slower'"
    )
    assert [each.transactional_id for each in await transactions.overdue(10)] == ["slower", "slow"]
    assert [each.transactional_id for each in await transactions.overdue(1)] == ["slower"]
    await end(transactions, "slower", committed=True)
    assert [each.transactional_id for each in await transactions.overdue(10)] == ["slow"]


async def test_idle_transactional_ids_are_forgotten_unless_a_transaction_is_open(
    transactions: TransactionStore, key: PartitionKey, sql: asyncpg.Connection
) -> None:
    await transactions.save(await transactions.read("idle"), SECOND)
    await begin(transactions, "open", FIRST, key)
    await sql.execute("update transactional_producer set updated_at = now() - interval '8 days'")
    await transactions.save(await transactions.read("young"), replace(FIRST, producer_id=4002))
    assert await transactions.expire(7 * 86_400_000, 100) == 1
    assert [each.transactional_id for each in await transactions.list_behind("", 10)] == ["open", "young"]


async def test_a_producer_with_an_open_transaction_is_not_forgotten(
    database: Database, log: LogStore, key: PartitionKey, transactions: TransactionStore, sql: asyncpg.Connection
) -> None:
    """Otherwise a repeated batch is appended twice, or the next batch is refused, because it does not begin at 0."""
    assert await transactions.save(await transactions.read("a"), FIRST)
    assert await transactions.add(await transactions.read("a"), [key], begins_at_zero=True)
    await log.append([transactional(key, 0)])
    await sql.execute("update producer_state set appended_at = now() - interval '1 hour'")
    assert await ProducerStore(database).expire(60_000, 100) == 0
    assert await log.append([transactional(key, 1)]) == [Appended(1, 0, 0, open_since_offset=0)]
    await end(transactions, "a", committed=True)
    await sql.execute("update producer_state set appended_at = now() - interval '1 hour'")
    assert await ProducerStore(database).expire(60_000, 100) == 1


async def test_a_transactions_partitions_and_state_can_be_described(
    log: LogStore, make_topic: MakeTopic, transactions: TransactionStore
) -> None:
    topic = await make_topic("seen", 2)
    keys = [part.partition_key for part in topic.partitions]
    await begin(transactions, "a", FIRST, *keys, groups=("g", "f"))
    await log.append([new_batch(keys[1]), transactional(keys[1], 0)])
    found = (await transactions.partitions([4000, 4001]))[4000]
    assert [(each.topic, each.partition_index, each.first_offset) for each in found] == [
        ("seen", 0, None),
        ("seen", 1, 1),
    ]
    assert await transactions.groups([4000]) == {4000: ["f", "g"]}
    (producer,) = await transactions.producers(keys[1], 10)
    assert (producer.producer_id, producer.producer_epoch, producer.last_sequence, producer.open_since_offset) == (
        4000,
        0,
        0,
        1,
    )
    (listed,) = await transactions.list_behind("", 10)
    assert listed.state == "Ongoing"
    assert listed.begun_ms is not None
    assert listed.begun_ms >= 0


async def test_the_start_of_a_transaction_is_known_until_its_producer_initializes_again(
    key: PartitionKey, transactions: TransactionStore
) -> None:
    await begin(transactions, "a", FIRST)
    began_ms = (await transactions.read("a")).started_ms
    await end(transactions, "a", committed=True)
    over = await transactions.read("a")
    assert (over.started_ms, over.last_started_ms) == (None, began_ms)
    (listed,) = await transactions.list_behind("", 10)
    assert listed.begun_ms is not None
    await begin(transactions, "a", FIRST, key)
    again = await transactions.read("a")
    assert again.started_ms is not None
    assert began_ms is not None
    assert again.started_ms > began_ms
    await end(transactions, "a", committed=False)
    over = await transactions.read("a")
    assert over.last_started_ms == again.started_ms
    assert over.record is not None

    aborted = replace(over.record, producer_epoch=1)
    assert await transactions.save(over, aborted)
    at_once = await transactions.read("a")
    assert at_once.last_started_ms is not None
    assert at_once.last_started_ms > again.started_ms, "one that has not begun is said to have begun as it was aborted"
    assert await transactions.save(at_once, replace(aborted, state="Empty"))
    assert (await transactions.read("a")).last_started_ms is None
    (listed,) = await transactions.list_behind("", 10)
    assert listed.begun_ms is None

    await begin(transactions, "a", FIRST, key)
    read = await transactions.read("a")
    assert await transactions.end(read, replace(FIRST, producer_epoch=2), marker(), committed=False, timestamp_ms=1)
    assert (await transactions.read("a")).last_started_ms is None


async def test_deleted_records_of_an_open_transaction_do_not_lower_the_last_stable_offset(
    log: LogStore, key: PartitionKey, transactions: TransactionStore
) -> None:
    await begin(transactions, "a", FIRST, key)
    await log.append([transactional(key, 0), new_batch(key), new_batch(key)])
    assert await log.delete_records(key, 2) == 2
    assert (await read_committed(log, key, 2)).state.last_stable_offset == 2
    assert (await log.states([key]))[key].last_stable_offset == 2


@pytest.mark.parametrize("most", [1, 2, 5, 100])
async def test_a_read_ends_before_it_would_return_too_many_aborted_transactions(
    database: Database, make_log: MakeLog, make_topic: MakeTopic, most: int
) -> None:
    """Readers need more reads to reach the end, and miss no committed record."""
    log = make_log(database, aborted=most)
    keys = [part.partition_key for part in (await make_topic("many", 3)).partitions]
    producers = [Producer(database, log, 5_000 + number) for number in range(4)]
    wanted: dict[PartitionKey, list[bytes | None]] = {key: [] for key in keys}
    for turn in range(6):
        for key in keys[:2]:
            for producer in producers:
                await producer.append(key, (None, b"aborted"))
            value = b"committed %d" % turn
            await append(log, plain_batch(key, (None, value)))
            wanted[key].append(value)
        for producer in producers:
            await producer.end(committed=False)
    offsets, taken = dict.fromkeys(keys, 0), {key: list[bytes | None]() for key in keys}
    ends = {key: state.high_watermark for key, state in (await log.states(keys)).items()}
    reads = 0
    while offsets != ends:
        requests = [ReadRequest(key, offsets[key], 10**6, committed=True) for key in keys]
        before = dict(offsets)
        for key, result in zip(keys, await log.read(requests, max_bytes=10**6), strict=True):
            assert isinstance(result, ReadResult)
            assert list(result.aborted) == sorted(result.aborted, key=lambda each: each.first_offset)
            taken[key] += [record.value for record in committed_records(result.batches, result.aborted)]
            if result.batches:
                offsets[key] = result.batches[-1].last_offset + 1
        assert offsets != before, "no progress"
        reads += 1
    assert taken == wanted
    assert (reads > 1) == (most < 48)


async def test_a_transaction_of_thousands_of_partitions_ends_in_each(
    transactions: TransactionStore, make_topic: MakeTopic, log: LogStore
) -> None:
    keys = [part.partition_key for part in (await make_topic("wide", 2_500)).partitions]
    await begin(transactions, "t", FIRST, *keys)
    await append(log, transactional(keys[1_700], 0))
    ended = await end(transactions, "t", committed=False)
    assert [marker.partition_key for marker in ended.markers] == sorted(keys)
    begun = {marker.partition_key: marker.first_offset for marker in ended.markers if marker.first_offset is not None}
    assert begun == {keys[1_700]: 0}
    assert {marker.base_offset for marker in ended.markers} == {0, 1}
    assert (await read_committed(log, keys[1_700])).aborted == (AbortedTransaction(FIRST.producer_id, 0),)


async def test_a_read_across_thousands_of_aborted_transactions_returns_each(
    log: LogStore, make_topic: MakeTopic, sql: asyncpg.Connection
) -> None:
    keys = [part.partition_key for part in (await make_topic("t", 2)).partitions]
    for key in keys:
        for _ in range(2):
            await append(log, plain_batch(key, (None, b"within")))
        await sql.execute(
            "insert into aborted_transaction"
            " (partition_key, last_offset, producer_id, first_offset, last_stable_offset)"
            " select $1, 10 + n, 5000 - n, -n, 0 from generate_series(0, $2) n",
            key,
            2_499 if key == keys[0] else 1,
        )
    requests = [ReadRequest(key, 0, 10**6, committed=True) for key in keys]
    many, few = await log.read(requests, max_bytes=10**6)
    assert isinstance(many, ReadResult)
    assert isinstance(few, ReadResult)
    told = [AbortedTransaction(5_000 - n, -n) for n in range(2_499, -1, -1)]
    assert (list(many.aborted), list(few.aborted)) == (told, told[-2:])


async def test_a_partition_without_the_producers_state_accepts_sequence_0_first(
    log: LogStore, key: PartitionKey, transactions: TransactionStore
) -> None:
    for producer, begins_at_zero in ((FIRST, True), (SECOND, False)):
        name = str(producer.producer_id)
        assert await transactions.save(await transactions.read(name), producer)
        assert await transactions.add(await transactions.read(name), [key], begins_at_zero=begins_at_zero)
    late, first, second = (transactional(key, sequence) for sequence in (1, 0, 1))
    outcomes = await log.append([late, first, second, transactional(key, 9, SECOND)])
    assert outcomes[0] is Refusal.OUT_OF_ORDER_SEQUENCE
    assert [each.base_offset for each in outcomes[1:] if isinstance(each, Appended)] == [0, 1, 2]
