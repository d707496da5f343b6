"""ListTransactions, DescribeTransactions, DescribeProducers and WriteTxnMarkers at handler level on a real Postgres."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from gateway.apis import SERVED
from gateway.apis.transactions import transaction_admin
from gateway.cluster.leases import partition_of
from gateway.coordinator.transactions import InitProducer, Producer
from protocol import codec
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.describe_producers import (
    DescribeProducersRequest,
    PartitionResponse,
    ProducerState,
    TopicRequest,
)
from protocol.messages.describe_transactions import DescribeTransactionsRequest, TransactionState
from protocol.messages.list_transactions import ListTransactionsRequest, ListTransactionsResponse
from protocol.messages.write_txn_markers import WritableTxnMarker, WritableTxnMarkerTopic, WriteTxnMarkersRequest
from protocol.schema import message_schema
from storage.errors import StorageUnavailable
from storage.types import Appended, NewBatch, PartitionKey, Topic
from tests.gateway.data_plane import DataPlane, data_plane, only
from tests.storage.batches import new_batch

LINES = {line.api_key: line for line in SERVED}
CONSUMER_OFFSETS = "__consumer_offsets"
LONG_MS = 30_000


@pytest.fixture
async def node(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url) as node:
        yield node


@pytest.fixture
async def sql(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url)
    await connection.execute("set search_path = sluice")
    yield connection
    await connection.close()


async def ask(node: DataPlane, request: Any, version: int = 0) -> Any:
    """Send the request at `version` through the codec and the handler, and return the answer as a client reads it."""
    line = LINES[message_schema(type(request)).api_key]
    decoded = codec.decode_request(line.api_key, version, b"".join(codec.encode(request, version)))
    try:
        response = await line.handler(decoded, node.context(line.api_key, version))
    except KafkaError as refused:
        response = line.refusal(decoded, version, refused.code, refused.message)
    body = b"".join(codec.encode_response(response, version))
    answer, end = codec.decode(codec.response_class(line.api_key), version, body)
    assert end == len(body)
    return answer


async def listed(node: DataPlane, version: int = 2, **filters: Any) -> list[str]:
    response: ListTransactionsResponse = await ask(node, ListTransactionsRequest(**filters), version)
    assert (response.error_code, response.unknown_state_filters) == (ErrorCode.NONE, ())
    return [found.transactional_id for found in response.transaction_states]


async def described(node: DataPlane, transactional_id: str) -> TransactionState:
    response = await ask(node, DescribeTransactionsRequest(transactional_ids=(transactional_id,)))
    return only(response.transaction_states)


async def producers(node: DataPlane, topic: Topic | str, index: int = 0) -> PartitionResponse:
    name = topic if isinstance(topic, str) else topic.name
    asked = TopicRequest(name=name, partition_indexes=(index,))
    response = await ask(node, DescribeProducersRequest(topics=(asked,)))
    return only(only(response.topics).partitions)


async def mark(
    node: DataPlane,
    producer: Producer,
    topic: Topic | str,
    *indexes: int,
    epoch: int | None = None,
    committed: bool = False,
) -> list[ErrorCode]:
    name = topic if isinstance(topic, str) else topic.name
    marker = WritableTxnMarker(
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch if epoch is None else epoch,
        transaction_result=committed,
        coordinator_epoch=0,
        topics=(WritableTxnMarkerTopic(name=name, partition_indexes=indexes),),
    )
    result = only((await ask(node, WriteTxnMarkersRequest(markers=(marker,)), 1)).markers)
    assert result.producer_id == producer.producer_id
    return [ErrorCode(partition.error_code) for partition in only(result.topics).partitions]


async def begin(
    node: DataPlane, transactional_id: str, keys: Sequence[PartitionKey] = (), group_ids: Sequence[str] = ()
) -> Producer:
    """Return a producer that has begun a transaction and enlisted these partitions."""
    producer = await node.transactions.initialize(transactional_id, InitProducer(60_000))
    if keys or group_ids:
        await node.transactions.add(
            transactional_id, producer.producer_id, producer.producer_epoch, keys, group_ids=group_ids
        )
    return producer


def batch(key: PartitionKey, producer: Producer, sequence: int = 0, records: int = 1) -> NewBatch:
    made = new_batch(key, records=records, producer=(producer.producer_id, producer.producer_epoch, sequence))
    return made._replace(is_transactional=True)


async def append(node: DataPlane, *batches: NewBatch) -> list[int]:
    appended = await node.log.append(list(batches))
    assert all(isinstance(each, Appended) for each in appended), appended
    return [each.base_offset for each in appended if isinstance(each, Appended)]


def keys(topic: Topic) -> list[PartitionKey]:
    return [partition.partition_key for partition in topic.partitions]


# --- ListTransactions -------------------------------------------------------------------------------------------------


async def test_ids_are_listed_with_their_state(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    first, second = await begin(node, "a"), await begin(node, "b", keys(topic))
    for version in range(3):
        response = await ask(node, ListTransactionsRequest(), version)
        assert [
            (each.transactional_id, each.producer_id, each.transaction_state) for each in response.transaction_states
        ] == [
            ("a", first.producer_id, "Empty"),
            ("b", second.producer_id, "Ongoing"),
        ]


async def test_transactions_must_match_all_filters(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    first, second = await begin(node, "app-1"), await begin(node, "app-2", keys(topic))
    await begin(node, "b")
    assert await listed(node, state_filters=("Empty",)) == ["app-1", "b"]
    assert await listed(node, state_filters=("PrepareCommit", "Dead")) == []
    assert await listed(node, producer_id_filters=(first.producer_id, second.producer_id)) == ["app-1", "app-2"]
    assert await listed(node, state_filters=("Empty",), producer_id_filters=(second.producer_id,)) == []
    assert await listed(node, duration_filter=3_600_000) == ["app-1", "b"], "as long as a time of -1 is ago"
    assert await listed(node, duration_filter=3_600_000, state_filters=("Ongoing",)) == []
    assert await listed(node, duration_filter=-1) == ["app-1", "app-2", "b"]
    assert await listed(node, transactional_id_pattern="app-.*") == ["app-1", "app-2"]
    assert await listed(node, transactional_id_pattern="app") == [], "of the whole id"
    assert await listed(node, transactional_id_pattern="") == ["app-1", "app-2", "b"]
    assert await listed(node, transactional_id_pattern="(?i)APP-.*", state_filters=("Ongoing",)) == ["app-2"]


async def test_duration_filter_applies_to_ended_transactions(node: DataPlane, sql: asyncpg.Connection) -> None:
    topic = await node.create_topic("t")
    for name in ("over", "open", "young"):
        producer = await begin(node, name, keys(topic))
        if name != "open":
            await node.transactions.end(name, producer.producer_id, producer.producer_epoch, committed=name == "over")
    await sql.execute(
        """
        update transactional_producer
        set started_at = started_at - interval '1 hour', last_started_at = last_started_at - interval '1 hour'
        where transactional_id <> 'young'
        """
    )
    assert await listed(node, duration_filter=1_000_000) == ["open", "over"]
    assert await listed(node, duration_filter=10_000_000) == []


async def test_unknown_states_are_returned(node: DataPlane) -> None:
    await begin(node, "a")
    response = await ask(node, ListTransactionsRequest(state_filters=("Empty", "empty", "x", "Dead", "x")))
    assert response.unknown_state_filters == ("empty", "x")
    assert [found.transactional_id for found in response.transaction_states] == ["a"]
    response = await ask(node, ListTransactionsRequest(state_filters=("x",)))
    assert (response.unknown_state_filters, response.transaction_states) == (("x",), ())


@pytest.mark.parametrize("pattern", ["(", r"(a)\1", "a{1000}{1000}", "a" * 20_000])
async def test_a_bad_pattern_is_refused(node: DataPlane, pattern: str) -> None:
    response = await ask(node, ListTransactionsRequest(transactional_id_pattern=pattern), 2)
    assert response.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION


async def test_many_transactional_ids_take_several_queries(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_admin, "AT_A_TIME", 2)
    names = ["a", "a\0b", "ä", "b", "日本"]
    for name in names:
        await begin(node, name)
    assert sorted(await listed(node)) == sorted(names)
    await begin(node, "z")
    assert sorted(await listed(node)) == sorted([*names, "z"])


async def test_each_node_lists_its_own_transactions(node: DataPlane, database_url: str) -> None:
    names = [f"id-{number}" for number in range(30)]
    async with data_plane(database_url, name="node-2") as other:
        await node.membership.renew()
        for name in names:
            await begin(node, name)
        here, there = await listed(node), await listed(other)
    assert sorted(here + there) == sorted(names)
    assert here
    assert there


# --- DescribeTransactions ---------------------------------------------------------------------------------------------


async def test_open_transaction_is_described(node: DataPlane) -> None:
    topic, other = await node.create_topic("t", 3), await node.create_topic("other")
    before_ms = time.time_ns() // 1_000_000
    producer = await begin(node, "a", [keys(topic)[2], keys(topic)[0], *keys(other)], ["group", "group-2"])
    found = await described(node, "a")
    assert before_ms - 1_000 <= found.transaction_start_time_ms <= time.time_ns() // 1_000_000 + 1_000
    assert (found.error_code, found.transaction_state, found.transaction_timeout_ms) == (0, "Ongoing", 60_000)
    assert (found.producer_id, found.producer_epoch) == (producer.producer_id, 0)
    indexes = tuple(sorted({partition_of("group", 50), partition_of("group-2", 50)}))
    assert [(each.topic, each.partitions) for each in found.topics] == [
        ("other", (0,)),
        ("t", (0, 2)),
        (CONSUMER_OFFSETS, indexes),
    ]


@pytest.mark.parametrize(("committed", "state"), [(True, "CompleteCommit"), (False, "CompleteAbort")])
async def test_ended_transaction_has_no_topics_and_keeps_its_start_time(
    node: DataPlane, committed: bool, state: str
) -> None:
    topic = await node.create_topic("t")
    producer = await begin(node, "a", keys(topic), ["group"])
    began_ms = (await described(node, "a")).transaction_start_time_ms
    await node.transactions.end("a", producer.producer_id, producer.producer_epoch, committed=committed)
    found = await described(node, "a")
    assert (found.transaction_state, found.transaction_start_time_ms, found.topics) == (state, began_ms, ())
    await begin(node, "a")
    assert (await described(node, "a")).transaction_start_time_ms == -1


async def test_each_id_is_answered_by_itself_and_once(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_admin, "AT_A_TIME", 2)
    for name in ("a", "b"):
        await begin(node, name)
    asked = ("b", "nobody's", "", "a", "b")
    response = await ask(node, DescribeTransactionsRequest(transactional_ids=asked))
    assert [(found.transactional_id, found.error_code) for found in response.transaction_states] == [
        ("b", ErrorCode.NONE),
        ("nobody's", ErrorCode.TRANSACTIONAL_ID_NOT_FOUND),
        ("", ErrorCode.INVALID_REQUEST),
        ("a", ErrorCode.NONE),
    ]


# --- DescribeProducers ------------------------------------------------------------------------------------------------


async def test_producers_are_described_with_open_transactions(node: DataPlane) -> None:
    topic = await node.create_topic("t", 2)
    (key, _) = keys(topic)
    producer = await begin(node, "a", keys(topic))
    assert (await producers(node, topic)).active_producers == (), "it has appended nothing"
    await append(node, new_batch(key, records=3, producer=(77, 5, 2**31 - 3)))
    await append(node, batch(key, producer, records=2))
    await append(node, batch(key, producer, 2))
    shown = await producers(node, topic)
    now_ms = time.time_ns() // 1_000_000
    assert all(abs(each.last_timestamp - now_ms) < 60_000 for each in shown.active_producers)
    assert [replace(each, last_timestamp=0) for each in shown.active_producers] == [
        ProducerState(
            producer_id=producer.producer_id,
            producer_epoch=0,
            last_sequence=2,
            last_timestamp=0,
            # An administrator needs this epoch to end the transaction (AbortTransactionSpec requires one).
            coordinator_epoch=0,
            current_txn_start_offset=3,
        ),
        ProducerState(
            producer_id=77, producer_epoch=5, last_sequence=2**31 - 1, last_timestamp=0, coordinator_epoch=-1
        ),
    ]
    await node.transactions.end("a", producer.producer_id, 0, committed=True)
    assert [each.current_txn_start_offset for each in (await producers(node, topic)).active_producers] == [-1, -1]
    assert (await producers(node, topic, 1)).active_producers == ()


async def test_many_producers_take_several_queries(node: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_admin, "AT_A_TIME", 2)
    topic = await node.create_topic("t")
    (key,) = keys(topic)
    for count in range(1, 6):
        await append(node, new_batch(key, producer=(1000 + count, 0, 0)))
        shown = await producers(node, topic)
        assert [each.producer_id for each in shown.active_producers] == [1001 + number for number in range(count)]


async def test_partition_named_often_is_answered_once(node: DataPlane) -> None:
    """A small request must not cause a very large answer."""
    topic = await node.create_topic("t", 2)
    for key in keys(topic):
        await append(node, new_batch(key, producer=(1000, 0, 0)))
    asked = tuple(TopicRequest(name="t", partition_indexes=indexes) for indexes in ((1, 1, 0), (0,), (1,)))
    response = await ask(node, DescribeProducersRequest(topics=asked))
    assert [part.partition_index for part in only(response.topics).partitions] == [1, 0]


async def test_producers_of_unknown_partitions_are_refused(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    for name, index, code in (
        ("missing", 0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (topic.name, 1, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (topic.name, -1, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ("no topic's name", 0, ErrorCode.INVALID_TOPIC_EXCEPTION),
    ):
        shown = await producers(node, name, index)
        assert (shown.partition_index, shown.error_code, shown.active_producers) == (index, code, ())
        assert shown.error_message is None


async def test_describe_producers_without_storage_is_retriable(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await node.create_topic("t")
    producer = await begin(node, "a", keys(topic))

    async def refuse(*_: object, **__: object) -> Any:
        raise StorageUnavailable("gone")

    monkeypatch.setattr(node.transactions.store, "producers", refuse)
    monkeypatch.setattr(node.transactions.store, "in_partition", refuse)
    assert (await producers(node, topic)).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert await mark(node, producer, topic, 0) == [ErrorCode.NOT_LEADER_OR_FOLLOWER]


# --- WriteTxnMarkers --------------------------------------------------------------------------------------------------


async def test_an_abort_in_one_partition_ends_all_of_it_and_fences_the_producer(node: DataPlane) -> None:
    topic = await node.create_topic("t", 2)
    outcomes = node.outcomes
    producer = await begin(node, "a", keys(topic), ["group"])
    await append(node, *(batch(key, producer) for key in keys(topic)))
    assert await mark(node, producer, topic, 1) == [ErrorCode.NONE]
    for key in keys(topic):
        state = (await node.log.states([key]))[key]
        assert (state.high_watermark, state.last_stable_offset) == (2, 2), "the marker is there"
    found = await described(node, "a")
    assert (found.transaction_state, found.producer_epoch, found.topics) == ("CompleteAbort", 1, ())
    assert outcomes == ["fenced"]
    with pytest.raises(KafkaError) as refused:
        await node.transactions.add("a", producer.producer_id, producer.producer_epoch, keys(topic))
    assert refused.value.code is ErrorCode.PRODUCER_FENCED
    with pytest.raises(KafkaError) as refused:
        await node.transactions.end("a", producer.producer_id, producer.producer_epoch, committed=True)
    assert refused.value.code is ErrorCode.PRODUCER_FENCED
    assert await mark(node, producer, topic, 1) == [ErrorCode.NONE], "the answer may have been lost"
    assert outcomes == ["fenced"]
    assert (await node.transactions.initialize("a", InitProducer(60_000))).producer_epoch == 2


async def test_marker_without_an_open_transaction_writes_nothing(node: DataPlane) -> None:
    topic = await node.create_topic("t", 2)
    (key, _) = keys(topic)
    producer = await begin(node, "a", [key])
    await append(node, batch(key, producer))
    assert await mark(node, producer, topic, 1) == [ErrorCode.NONE]
    assert await mark(node, replace(producer, producer_id=10**6), topic, 0) == [ErrorCode.NONE]
    assert (await described(node, "a")).transaction_state == "Ongoing"
    states = await node.log.states(keys(topic))
    assert [states[each].high_watermark for each in keys(topic)] == [1, 0]


async def test_marker_of_a_former_producer_ends_nothing(node: DataPlane) -> None:
    topic = await node.create_topic("t", 2)
    (key, other) = keys(topic)
    await begin(node, "a")
    producer = await begin(node, "a", [key, other])
    assert producer.producer_epoch == 1
    await append(node, batch(key, producer))
    assert await mark(node, producer, topic, 0, 1, epoch=0) == [ErrorCode.INVALID_PRODUCER_EPOCH] * 2
    assert (await described(node, "a")).transaction_state == "Ongoing"
    await node.transactions.end("a", producer.producer_id, 1, committed=True)
    # Upstream does the same: each partition remembers the epoch of a producer that has appended to it.
    assert await mark(node, producer, topic, 0, 1, epoch=0) == [ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.NONE]


async def test_commit_marker_is_refused(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    producer = await begin(node, "a", keys(topic))
    await append(node, batch(keys(topic)[0], producer))
    assert await mark(node, producer, topic, 0, committed=True) == [ErrorCode.INVALID_REQUEST]
    assert (await described(node, "a")).transaction_state == "Ongoing"
    assert (await node.log.states(keys(topic)))[keys(topic)[0]].high_watermark == 1


@pytest.mark.parametrize("count", [50, 3, 1])
async def test_transaction_of_offsets_alone_is_described_as_open(node: DataPlane, count: int) -> None:
    await node.create_topic(CONSUMER_OFFSETS, count, internal=True)
    producer = await begin(node, "a", group_ids=["group"])
    (shown,) = (await described(node, "a")).topics
    (index,) = shown.partitions
    assert index == partition_of("group", count)
    if count > 1:
        assert await mark(node, producer, shown.topic, (index + 1) % count) == [ErrorCode.NONE]
    assert (await described(node, "a")).transaction_state == "Ongoing"
    assert await mark(node, producer, shown.topic, index, epoch=-1) == [ErrorCode.INVALID_PRODUCER_EPOCH]
    assert await mark(node, producer, shown.topic, index) == [ErrorCode.NONE]
    found = await described(node, "a")
    assert (found.transaction_state, found.producer_epoch) == ("CompleteAbort", 1)


async def test_marker_for_an_unknown_partition_is_refused(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    producer = await begin(node, "a", keys(topic))
    assert await mark(node, producer, "missing", 0, 1) == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION] * 2
    assert await mark(node, producer, topic, 1, 0) == [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.NONE]
    assert (await ask(node, WriteTxnMarkersRequest(), 1)).markers == ()


@pytest.mark.parametrize("goes_on", [False, True])
async def test_producers_own_end_wins_against_a_marker(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """Between the read and the write of the marker, the producer commits. It may even have begun
    another transaction.
    """
    topic = await node.create_topic("t")
    producer = await begin(node, "a", keys(topic))
    await append(node, batch(keys(topic)[0], producer))
    look = node.transactions.store.in_partition

    async def look_and_lose(producer_id: int, key: PartitionKey) -> Any:
        found = await look(producer_id, key)
        monkeypatch.setattr(node.transactions.store, "in_partition", look)
        await node.transactions.end("a", producer_id, 0, committed=True)
        if goes_on:
            await node.transactions.add("a", producer_id, 0, keys(topic))
        return found

    monkeypatch.setattr(node.transactions.store, "in_partition", look_and_lose)
    assert await mark(node, producer, topic, 0) == [ErrorCode.NONE]
    found = await described(node, "a")
    assert (found.transaction_state, found.producer_epoch) == ("Ongoing" if goes_on else "CompleteCommit", 0)
    assert (await node.log.states(keys(topic)))[keys(topic)[0]].high_watermark == 2, "its own marker is the only one"
