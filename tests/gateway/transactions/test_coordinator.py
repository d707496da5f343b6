"""Ends of transactions on one node and on two: what readers see, and how a transaction that cannot
end affects others.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import asyncpg
import pytest

from gateway.apis.transactions.init_producer_id import init_producer_id
from gateway.apis.transactions.lifecycle import add_offsets_to_txn, end_txn
from gateway.coordinator.transactions import InitProducer, Producer
from gateway.net.context import RequestContext
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from protocol.messages.end_txn import EndTxnRequest
from protocol.messages.init_producer_id import InitProducerIdRequest
from protocol.records import Record, build_batch
from storage.errors import StorageUnavailable
from storage.transactions import EndedTransaction, ProducerRecord, StoredProducer
from storage.types import Appended, NewBatch, PartitionKey, Topic
from tests.gateway.data_plane import DataPlane, Hears, data_plane, locked_partition, offsets_in
from tests.steps.waiting import until_blocked

READ_COMMITTED = 1


@pytest.fixture
async def nodes(database_url: str) -> AsyncIterator[tuple[DataPlane, DataPlane]]:
    """Two nodes on one database, each informed of the other's markers."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(data_plane(database_url, name="node-1"))
        second = await stack.enter_async_context(data_plane(database_url, name="node-2"))
        first.markers.listener = Hears(lambda key, end: second.tail.heard(key, end, loop.time()))
        second.markers.listener = Hears(lambda key, end: first.tail.heard(key, end, loop.time()))
        yield first, second


@pytest.fixture
async def node(nodes: tuple[DataPlane, DataPlane]) -> DataPlane:
    return nodes[0]


async def begin(node: DataPlane, name: str, *keys: PartitionKey) -> Producer:
    producer = await node.transactions.initialize(name, InitProducer(60_000))
    await node.transactions.add(name, producer.producer_id, producer.producer_epoch, keys)
    return producer


async def write(node: DataPlane, topic: Topic, producer: Producer, sequence: int) -> int:
    """Append a record of the producer's transaction, as Produce does; return its offset."""
    records = build_batch(
        [Record(0, 1_000, None, b"v")],
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        base_sequence=sequence,
        is_transactional=True,
    )
    identity = (producer.producer_id, producer.producer_epoch, sequence)
    batch = NewBatch(topic.partitions[0].partition_key, bytearray(records), 1, 1_000, *identity, is_transactional=True)
    appended = await node.appender.submit(batch)
    assert isinstance(appended, Appended), appended
    return appended.base_offset


async def committed(node: DataPlane, topic: Topic, offset: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the offsets of the batches of a Fetch with read_committed, and the aborted transactions that it names."""
    part = await node.fetch_one(topic, offset, isolation_level=READ_COMMITTED)
    assert part.aborted_transactions is not None
    return offsets_in(part), [(each.producer_id, each.first_offset) for each in part.aborted_transactions]


async def test_reader_learns_of_transactions_that_another_node_aborted(
    nodes: tuple[DataPlane, DataPlane],
) -> None:
    writing, ending = nodes
    topic = await writing.create_topic("t")
    producer = await begin(writing, "a", topic.partitions[0].partition_key)
    assert [await write(writing, topic, producer, sequence) for sequence in range(3)] == [0, 1, 2]
    assert await committed(writing, topic, 0) == ([], [])
    await ending.transactions.end("a", producer.producer_id, producer.producer_epoch, committed=False)
    aborted = [(producer.producer_id, 0)]
    for offset in (0, 1, 0):
        assert await committed(writing, topic, offset) == (list(range(offset, 4)), aborted)
    producer = await begin(writing, "a", topic.partitions[0].partition_key)
    assert await write(writing, topic, producer, 0) == 4
    assert await committed(writing, topic, 0) == ([0, 1, 2, 3], aborted)


@pytest.mark.parametrize("cold", [False, True])
async def test_many_aborted_transactions_are_named_as_few_are(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch, *, cold: bool
) -> None:
    """An answer that is built in pieces equals one that is built at once."""
    topic = await node.create_topic("t")
    producers = [await begin(node, f"p{number}", topic.partitions[0].partition_key) for number in range(7)]
    for producer in producers:
        await write(node, topic, producer, 0)
    for number, producer in reversed([*enumerate(producers)]):
        await node.transactions.end(f"p{number}", producer.producer_id, producer.producer_epoch, committed=False)
    wanted = [(producer.producer_id, offset) for offset, producer in enumerate(producers)]
    for piece in (200, 7, 3, 2, 1):
        monkeypatch.setattr(importlib.import_module("gateway.apis.data.fetch"), "PIECE", piece)
        monkeypatch.setattr(importlib.import_module("gateway.net.pieces"), "PIECE", piece)
        if cold:
            node.tail.reset()
        assert await committed(node, topic, 0) == (list(range(14)), wanted)


async def test_an_end_of_unknown_outcome_hides_no_abort(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await node.create_topic("t")
    producer = await begin(node, "a", topic.partitions[0].partition_key)
    await write(node, topic, producer, 0)
    end = node.transactions.store.end

    async def lost(
        read: StoredProducer, record: ProducerRecord, marker: bytes, *, committed: bool, timestamp_ms: int
    ) -> EndedTransaction | None:
        await end(read, record, marker, committed=committed, timestamp_ms=timestamp_ms)
        raise StorageUnavailable("the connection went with the answer")

    monkeypatch.setattr(node.transactions.store, "end", lost)
    with pytest.raises(StorageUnavailable):
        await node.transactions.end("a", producer.producer_id, producer.producer_epoch, committed=False)
    monkeypatch.setattr("gateway.log.tail.DOUBTFUL_AGE_S", 0.0)
    for _ in range(2):
        assert await committed(node, topic, 0) == ([0, 1], [(producer.producer_id, 0)])
    # A repeated EndTxn gets the outcome of the first.
    await node.transactions.end("a", producer.producer_id, producer.producer_epoch, committed=False)


async def test_newer_transaction_is_not_mistaken_for_the_overdue_one(
    node: DataPlane, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await node.create_topic("t")
    key = topic.partitions[0].partition_key
    producer = await begin(node, "a", key)
    await outlive(database_url)
    overdue = node.transactions.store.overdue

    async def end_and_begin(limit: int) -> object:
        found = await overdue(limit)
        await node.transactions.end("a", producer.producer_id, producer.producer_epoch, committed=True)
        await node.transactions.add("a", producer.producer_id, producer.producer_epoch, [key])
        return found

    monkeypatch.setattr(node.transactions.store, "overdue", end_and_begin)
    assert await node.transactions.abort_overdue() == 0
    await write(node, topic, producer, 0)
    await node.transactions.end("a", producer.producer_id, producer.producer_epoch, committed=True)
    assert await committed(node, topic, 0) == ([0, 1, 2], [])


async def test_an_end_that_another_node_has_carried_out_leaves_the_next_transaction_open(
    nodes: tuple[DataPlane, DataPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = nodes
    topic = await slow.create_topic("t")
    key = topic.partitions[0].partition_key
    producer = await begin(slow, "a", key)
    number, epoch = producer.producer_id, producer.producer_epoch
    end = slow.transactions.store.end

    async def overtaken(
        read: StoredProducer, record: ProducerRecord, marker: bytes, *, committed: bool, timestamp_ms: int
    ) -> EndedTransaction | None:
        # The client has repeated the request elsewhere, and has begun its next transaction, with the same epoch.
        monkeypatch.setattr(slow.transactions.store, "end", end)
        await other.transactions.end("a", number, epoch, committed=True)
        await other.transactions.add("a", number, epoch, [key])
        return await end(read, record, marker, committed=committed, timestamp_ms=timestamp_ms)

    monkeypatch.setattr(slow.transactions.store, "end", overtaken)
    with pytest.raises(KafkaError) as raised:
        await slow.transactions.end("a", number, epoch, committed=True)
    assert raised.value.code is ErrorCode.INVALID_TXN_STATE
    await write(other, topic, producer, 0)
    assert await committed(other, topic, 1) == ([], [])  # offset 0 is the marker of the first transaction


@pytest.mark.parametrize("has_open_transaction", [False, True])
async def test_an_initialization_that_another_has_overtaken_fences_no_producer(
    nodes: tuple[DataPlane, DataPlane], monkeypatch: pytest.MonkeyPatch, *, has_open_transaction: bool
) -> None:
    slow, other = nodes
    topic = await slow.create_topic("t")
    if has_open_transaction:
        await begin(slow, "a", *keys(topic))
    store = slow.transactions.store
    save, end = store.save, store.end
    later: list[Producer] = []

    async def move_on() -> None:
        # The client has repeated the request elsewhere, and has begun a transaction.
        monkeypatch.setattr(store, "save", save)
        monkeypatch.setattr(store, "end", end)
        later.append(await begin(other, "a", *keys(topic)))

    async def save_late(read: StoredProducer, record: ProducerRecord) -> bool:
        await move_on()
        return await save(read, record)

    async def end_late(
        read: StoredProducer, record: ProducerRecord, marker: bytes, *, committed: bool, timestamp_ms: int
    ) -> EndedTransaction | None:
        await move_on()
        return await end(read, record, marker, committed=committed, timestamp_ms=timestamp_ms)

    monkeypatch.setattr(store, "save", save_late)
    monkeypatch.setattr(store, "end", end_late)
    with pytest.raises(KafkaError) as raised:
        await slow.transactions.initialize("a", InitProducer(60_000))
    assert raised.value.code is ErrorCode.CONCURRENT_TRANSACTIONS
    (producer,) = later
    await write(other, topic, producer, 0)
    await other.transactions.end("a", producer.producer_id, producer.producer_epoch, committed=True)


async def test_a_partition_that_is_enlisted_late_begins_no_further_transaction(
    nodes: tuple[DataPlane, DataPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = nodes
    topic = await slow.create_topic("t")
    producer = await slow.transactions.initialize("a", InitProducer(60_000))
    identity = ("a", producer.producer_id, producer.producer_epoch)
    add = slow.transactions.store.add

    async def overtaken(
        read: StoredProducer,
        partition_keys: Sequence[PartitionKey],
        group_ids: Sequence[str] = (),
        *,
        begins_at_zero: bool = False,
    ) -> bool:
        # The client has repeated the request elsewhere, and has ended its transaction.
        monkeypatch.setattr(slow.transactions.store, "add", add)
        await other.transactions.add(*identity, keys(topic))
        await other.transactions.end(*identity, committed=True)
        return await add(read, partition_keys, group_ids, begins_at_zero=begins_at_zero)

    monkeypatch.setattr(slow.transactions.store, "add", overtaken)
    with pytest.raises(KafkaError) as raised:
        await slow.transactions.add(*identity, keys(topic))
    assert raised.value.code is ErrorCode.CONCURRENT_TRANSACTIONS
    assert (await other.transactions.store.read("a")).started_ms is None, "otherwise its timeout fences the producer"


def overtaken(
    node: DataPlane, context: RequestContext, monkeypatch: pytest.MonkeyPatch, go_on: Callable[[], Awaitable[object]]
) -> None:
    """Before the node's next read of a producer's row, let the client close its connection and go on elsewhere."""
    store = node.transactions.store
    read = store.read

    async def read_late(transactional_id: str) -> StoredProducer:
        monkeypatch.setattr(store, "read", read)
        context.connection.lose_peer()
        await go_on()
        return await read(transactional_id)

    monkeypatch.setattr(store, "read", read_late)


@pytest.mark.parametrize("is_committed", [False, True])
async def test_an_end_that_is_read_after_its_client_has_gone_leaves_the_next_transaction_open(
    nodes: tuple[DataPlane, DataPlane], monkeypatch: pytest.MonkeyPatch, *, is_committed: bool
) -> None:
    slow, other = nodes
    topic = await slow.create_topic("t")
    producer = await begin(slow, "a", *keys(topic))
    identity = ("a", producer.producer_id, producer.producer_epoch)
    context = slow.context(ApiKey.END_TXN, 4)

    async def go_on() -> None:
        await other.transactions.end(*identity, committed=True)
        await other.transactions.add(*identity, keys(topic))
        await write(other, topic, producer, 0)

    overtaken(slow, context, monkeypatch, go_on)
    with pytest.raises(KafkaError):
        await end_txn(
            EndTxnRequest(
                transactional_id="a",
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                committed=is_committed,
            ),
            context,
        )
    await write(other, topic, producer, 1)
    await other.transactions.end(*identity, committed=True)
    assert await committed(other, topic, 0) == ([0, 1, 2, 3], [])


async def test_a_group_that_is_enlisted_after_its_client_has_gone_begins_no_transaction(
    nodes: tuple[DataPlane, DataPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = nodes
    producer = await slow.transactions.initialize("a", InitProducer(60_000))
    identity = ("a", producer.producer_id, producer.producer_epoch)
    context = slow.context(ApiKey.ADD_OFFSETS_TO_TXN, 3)

    async def go_on() -> None:
        await other.transactions.add(*identity, group_ids=("g",))
        await other.transactions.end(*identity, committed=True)

    overtaken(slow, context, monkeypatch, go_on)
    with pytest.raises(KafkaError):
        await add_offsets_to_txn(
            AddOffsetsToTxnRequest(
                transactional_id="a",
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                group_id="g",
            ),
            context,
        )
    assert (await other.transactions.store.read("a")).started_ms is None, "otherwise its timeout fences the producer"


async def test_an_initialization_that_is_read_after_its_client_has_gone_fences_no_producer(
    nodes: tuple[DataPlane, DataPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, other = nodes
    topic = await slow.create_topic("t")
    context = slow.context(ApiKey.INIT_PRODUCER_ID, 4)
    later: list[Producer] = []

    async def go_on() -> None:
        later.append(await begin(other, "a", *keys(topic)))

    overtaken(slow, context, monkeypatch, go_on)
    with pytest.raises(KafkaError):
        await init_producer_id(InitProducerIdRequest(transactional_id="a", transaction_timeout_ms=60_000), context)
    (producer,) = later
    await write(other, topic, producer, 0)
    await other.transactions.end("a", producer.producer_id, producer.producer_epoch, committed=True)


async def test_repeated_ends_are_carried_out_in_their_order(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = await node.create_topic("t")
    key = topic.partitions[0].partition_key
    producer = await begin(node, "a", key)
    number, epoch = producer.producer_id, producer.producer_epoch
    reads, proceed = 0, asyncio.Event()
    read = node.transactions.store.read

    async def slow_at_first(transactional_id: str) -> StoredProducer:
        nonlocal reads
        reads += 1
        if reads == 1:
            await proceed.wait()
        return await read(transactional_id)

    monkeypatch.setattr(node.transactions.store, "read", slow_at_first)
    first, second = (asyncio.create_task(node.transactions.end("a", number, epoch, committed=True)) for _ in range(2))
    done, _ = await asyncio.wait((first, second), timeout=0.2)
    assert not done, "otherwise the client begins its next transaction, and the first request ends it"
    proceed.set()
    assert await first == await second


async def test_a_node_that_others_may_take_for_dead_ends_no_transaction_of_a_lasting_epoch(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await node.create_topic("t")
    producer = await begin(node, "a", topic.partitions[0].partition_key)
    number, epoch = producer.producer_id, producer.producer_epoch
    with monkeypatch.context() as patched:
        patched.setattr(node.membership, "_registered_until_s", asyncio.get_running_loop().time() - 0.001)
        with pytest.raises(KafkaError) as raised:
            await node.transactions.end("a", number, epoch, committed=True)
        assert raised.value.code is ErrorCode.NOT_COORDINATOR
    await node.transactions.end("a", number, epoch, committed=True)


async def test_a_node_that_others_may_take_for_dead_enlists_no_partition_of_a_deleted_topic(
    nodes: tuple[DataPlane, DataPlane], database_url: str
) -> None:
    """A topic of the same name may exist by now, in which the producer's first batch would be refused for good."""
    silent, other = nodes
    old = await silent.create_topic("t")
    producer = await other.transactions.initialize("a", InitProducer(60_000))
    number, epoch = producer.producer_id, producer.producer_epoch
    sql = await asyncpg.connect(database_url)
    node_id = silent.membership.node_id
    await sql.execute("update sluice.node set expires_at = clock_timestamp() where node_id = $1", node_id)
    await sql.close()
    silent.membership.lapse()
    await other.topics.delete(old.topic_id)
    new = await other.create_topic("t")
    known = silent.catalog.get("t")
    assert known is not None
    assert known.topic_id == old.topic_id
    with pytest.raises(KafkaError) as raised:
        await silent.transactions.add("a", number, epoch, [known.partitions[0].partition_key])
    assert raised.value.code is ErrorCode.NOT_COORDINATOR
    await other.transactions.add("a", number, epoch, [new.partitions[0].partition_key])
    assert await write(other, new, producer, 0) == 0


async def test_transaction_that_cannot_end_keeps_no_other_open(
    node: DataPlane, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await node.create_topic("t")
    await begin(node, "first", topic.partitions[0].partition_key)
    second = await begin(node, "second", topic.partitions[0].partition_key)
    await outlive(database_url)
    end = node.transactions.store.end

    async def refuse(
        read: StoredProducer, record: ProducerRecord, marker: bytes, *, committed: bool, timestamp_ms: int
    ) -> EndedTransaction | None:
        if read.transactional_id == "first":
            raise StorageUnavailable("it takes too long")
        return await end(read, record, marker, committed=committed, timestamp_ms=timestamp_ms)

    monkeypatch.setattr(node.transactions.store, "end", refuse)
    with pytest.raises(StorageUnavailable):
        await node.transactions.abort_overdue()
    with pytest.raises(KafkaError) as fenced:
        await node.transactions.end("second", second.producer_id, second.producer_epoch, committed=True)
    assert fenced.value.code is ErrorCode.PRODUCER_FENCED


async def test_many_markers_are_recorded_in_pieces(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the pieces the event loop runs other tasks. If the caller gives up before all markers are recorded, the
    known offsets are in doubt.
    """
    monkeypatch.setattr(importlib.import_module("gateway.net.pieces"), "TURN_S", 0.0)
    topic = await node.create_topic("t", 50)
    keys = [part.partition_key for part in topic.partitions]
    told: list[PartitionKey] = []
    doubts: list[str] = []
    first_told = asyncio.Event()

    def tell(key: PartitionKey, _: int) -> None:
        told.append(key)
        first_told.set()

    node.markers.listener = Hears(tell, lambda: doubts.append("in doubt"))
    producer = await begin(node, "a", *keys)
    ending = asyncio.create_task(
        node.transactions.end("a", producer.producer_id, producer.producer_epoch, committed=True)
    )
    await first_told.wait()
    assert len(told) < len(keys)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert len(told) < len(keys)
    assert doubts
    assert node.tail.doubtful(asyncio.get_running_loop().time())


async def test_ends_waiting_for_a_partition_leave_connections_to_appends(node: DataPlane, database_url: str) -> None:
    topic, other = await node.create_topic("t"), await node.create_topic("other")
    names = [f"id-{number}" for number in range(8)]
    producers = {name: await begin(node, name, topic.partitions[0].partition_key) for name in names}
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        ends = [
            asyncio.create_task(node.transactions.end(name, producer.producer_id, 0, committed=True))
            for name, producer in producers.items()
        ]
        await until_blocked(connection)
        for _ in range(3):
            async with asyncio.timeout(2.0):
                await node.fill(other, [100])
        assert not any(end.done() for end in ends)
    await asyncio.gather(*ends)
    assert await committed(node, topic, 0) == (list(range(len(names))), [])


async def outlive(database_url: str) -> None:
    """Advance the clock beyond the timeout of any transaction."""
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute("update sluice.transactional_producer set started_at = started_at - interval '1 hour'")
    finally:
        await connection.close()


async def test_producer_continues_under_another_id_after_its_last_epoch(
    nodes: tuple[DataPlane, DataPlane], database_url: str
) -> None:
    node, other = nodes
    topic = await node.create_topic("t")
    first = await node.transactions.initialize("p", InitProducer(60_000))
    sql = await asyncpg.connect(database_url)
    try:
        await sql.execute("update sluice.transactional_producer set producer_epoch = 32765")
    finally:
        await sql.close()
    producer = replace(first, producer_epoch=32765)
    identities: list[tuple[int, int]] = []
    for number in range(3):
        await node.transactions.add("p", producer.producer_id, producer.producer_epoch, keys(topic), named=False)
        assert await write(node, topic, producer, 0) == 2 * number
        asked = ("p", producer.producer_id, producer.producer_epoch)
        producer = await node.transactions.end(*asked, committed=True, raise_epoch=True)
        again = await other.transactions.end(*asked, committed=True, raise_epoch=True)
        assert again == producer
        identities.append((producer.producer_id, producer.producer_epoch))
    fresh_id = identities[1][0]
    assert identities == [(first.producer_id, 32766), (fresh_id, 0), (fresh_id, 1)]
    assert fresh_id != first.producer_id
    with pytest.raises(KafkaError) as refused:
        await node.transactions.add("p", first.producer_id, 32766, keys(topic), named=False)
    assert refused.value.code is ErrorCode.PRODUCER_FENCED, "as Kafka's log, which has the marker that fenced it"
    with pytest.raises(KafkaError) as refused:
        await node.transactions.add("p", first.producer_id, 32766, keys(topic))
    assert refused.value.code is ErrorCode.INVALID_PRODUCER_ID_MAPPING, "as Kafka's coordinator"
    stranger = await begin(node, "q", keys(topic)[0])
    with pytest.raises(KafkaError) as refused:
        await node.transactions.add("p", stranger.producer_id, 0, keys(topic), named=False)
    assert refused.value.code is ErrorCode.INVALID_PRODUCER_ID_MAPPING, "of another transactional id"
    await node.transactions.end("q", stranger.producer_id, 0, committed=False)
    assert await committed(other, topic, 0) == ([0, 1, 2, 3, 4, 5, 6], [])


async def test_a_transaction_of_a_producer_that_continued_in_a_new_history_times_out_for_its_owner(
    node: DataPlane, database_url: str
) -> None:
    topic = await node.create_topic("t")
    first = await node.transactions.initialize("p", InitProducer(60_000))
    sql = await asyncpg.connect(database_url)
    try:
        # As adopt_history raises the epochs.
        await sql.execute(
            "update sluice.transactional_producer set producer_epoch = producer_epoch + 1000,"
            " last_producer_epoch = producer_epoch, state = 'CompleteAbort'"
        )
    finally:
        await sql.close()
    asked = InitProducer(60_000, first.producer_id, first.producer_epoch)
    producer = await node.transactions.initialize("p", asked)
    assert producer.producer_epoch == 1000
    await node.transactions.add("p", producer.producer_id, producer.producer_epoch, keys(topic))
    await outlive(database_url)
    assert await node.transactions.abort_overdue() == 1
    after = await node.transactions.end("p", producer.producer_id, 1000, committed=False, raise_epoch=True)
    assert after.producer_epoch == 1001


async def test_an_idle_producer_that_has_aborted_after_one_loss_of_commits_continues_after_another(
    node: DataPlane, database_url: str
) -> None:
    producer = await node.transactions.initialize("p", InitProducer(60_000))
    sql = await asyncpg.connect(database_url)
    try:
        await sql.execute("set search_path = sluice")
        schema = await sql.fetchval("select nspname from pg_namespace where nspname ~ '^sluice_[0-9a-f]{12}$'")
        await sql.execute(f"select {schema}.adopt_history('first', -1)")
        for number in (1, 2):
            await sql.execute(f"select {schema}.adopt_history('another {number}', -1)")
            asked = ("p", producer.producer_id, producer.producer_epoch)
            answers = [await node.transactions.end(*asked, committed=False, raise_epoch=True) for _ in range(2)]
            assert answers[0] == answers[1]
            producer = answers[0]
            assert producer.producer_epoch == 1000 * number
    finally:
        await sql.close()


async def test_partition_is_not_enlisted_after_its_transactional_id_has_expired(
    node: DataPlane, database_url: str
) -> None:
    """The partition still remembers the producer (upstream: ProducerIdExpirationTest)."""
    topic = await node.create_topic("t")
    producer = await begin(node, "p", *keys(topic))
    await write(node, topic, producer, 0)
    ended = await node.transactions.end("p", producer.producer_id, producer.producer_epoch, committed=True)
    sql = await asyncpg.connect(database_url)
    try:
        assert await sql.execute("delete from sluice.transactional_producer") == "DELETE 1"
    finally:
        await sql.close()
    with pytest.raises(KafkaError) as refused:
        await node.transactions.add("p", ended.producer_id, ended.producer_epoch, keys(topic), named=False)
    assert refused.value.code is ErrorCode.INVALID_PRODUCER_ID_MAPPING


def keys(topic: Topic) -> list[PartitionKey]:
    return [partition.partition_key for partition in topic.partitions]
