"""Records of internal topics are written while clients read them, on a real Postgres. The tests read them back from the
log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from gateway.apis.admin.new_topics import plan_internal
from gateway.cluster.leases import partition_of
from gateway.config.broker import BrokerConfig
from gateway.coordinator.consumer.model import ConsumerGroupHeartbeat
from gateway.coordinator.facts import MemberId
from gateway.coordinator.machine import ConnectionId
from gateway.coordinator.transactions import EXHAUSTED_FROM_EPOCH, InitProducer
from gateway.internal_log.sources import OFFSET_PAGES, GroupSource, OffsetPages, TransactionSource
from gateway.internal_log.writer import BOUNDS, Bounds, InternalLogs
from gateway.log.appender import Appender
from gateway.log.tail import Tail
from gateway.log.topic_names import CONSUMER_OFFSETS, TRANSACTION_STATE
from protocol import coordinator_records as log
from protocol.coordinator_records import Kind, decode_key, decode_value
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from protocol.records import Record, build_batch, iter_records
from storage.log import LogStore
from storage.pool import Row
from storage.queries import statement
from storage.types import NewBatch, ReadRequest, ReadResult, Topic
from tests.gateway.group_node import GroupNode, group_node, reply_of, settle

G = "g"
OFFSETS_PARTITIONS, STATE_PARTITIONS = 7, 3
GROUP_KINDS = (
    *(log.OFFSET_COMMIT, log.GROUP_METADATA, log.CONSUMER_GROUP, log.CONSUMER_MEMBER),
    *(log.CONSUMER_TARGET_EPOCH, log.CONSUMER_TARGET, log.CONSUMER_ASSIGNMENT),
)


@dataclass
class Followed:
    """A node, and its writer of internal topics."""

    node: GroupNode
    log: LogStore
    appender: Appender
    logs: InternalLogs
    told: list[str] = field(default_factory=list[str])

    async def written(self, topic_name: str, owner: str, *, behind: int = 0) -> list[Record]:
        """Return the records from offset `behind` on, in the partition where Kafka would look for the owner."""
        topic = self.node.services.catalog.get(topic_name)
        assert topic is not None
        index = partition_of(owner, len(topic.partitions))
        records: list[Record] = []
        for partition in topic.partitions:
            request = ReadRequest(partition.partition_key, behind, 10_000_000)
            (result,) = await self.log.read([request], max_bytes=10_000_000)
            assert isinstance(result, ReadResult)
            found = [record for batch in result.batches for record in iter_records(batch.records)]
            if partition.partition_index == index:
                records = [record for record in found if record.offset >= behind]
        return records

    async def end(self, topic_name: str, owner: str) -> int:
        records = await self.written(topic_name, owner)
        return records[-1].offset + 1 if records else 0

    async def commit(self, topic: Topic, offset: int, *, group_id: str = G, partition: int = 0) -> None:
        asked = OffsetCommitRequestPartition(
            partition_index=partition, committed_offset=offset, committed_leader_epoch=-1, committed_metadata="m"
        )
        request = OffsetCommitRequest(
            group_id=group_id,
            generation_id_or_member_epoch=-1,
            topics=(OffsetCommitRequestTopic(name=topic.name, partitions=(asked,)),),
        )
        answer = await self.node.ask(request, 8)
        assert answer.topics[0].partitions[0].error_code == 0


def told_by(record: Record) -> tuple[Kind, Any, Any]:
    """Return kind, key and value of each record. The value is None if the record deletes the key."""
    assert record.key is not None
    kind = next(kind for kind in GROUP_KINDS if kind.number == int.from_bytes(record.key[:2]))
    value = None if record.value is None else decode_value(kind, record.value)[1]
    return kind, decode_key(kind, record.key), value


def told_of_transaction(record: Record) -> Any:
    assert record.key is not None
    return None if record.value is None else decode_value(log.TRANSACTION, record.value)[1]


@asynccontextmanager
async def following(
    node: GroupNode, bounds: Bounds = BOUNDS, offset_pages: OffsetPages = OFFSET_PAGES
) -> AsyncGenerator[Followed]:
    store, tail = LogStore(node.database), Tail(0)
    appender = Appender(store, tail)
    told: list[str] = []

    async def tell(topic_name: str) -> None:
        told.append(topic_name)

    transactions = node.services.transactions
    sources = (
        GroupSource(node.groups, node.leases, node.store, node.offsets, offset_pages),
        TransactionSource(transactions, lambda: OFFSETS_PARTITIONS),
    )
    logs = InternalLogs(node.services.catalog, store, appender, sources, tell, bounds=bounds)
    yield Followed(node, store, appender, logs, told)
    await store.close()


@pytest_asyncio.fixture
async def followed(database_url: str) -> AsyncGenerator[Followed]:
    broker = BrokerConfig(
        offsets_topic_num_partitions=OFFSETS_PARTITIONS, transaction_state_log_num_partitions=STATE_PARTITIONS
    )
    async with group_node(database_url) as node:
        await node.topics.create([plan_internal(name, broker) for name in (CONSUMER_OFFSETS, TRANSACTION_STATE)])
        await node.services.catalog.refresh_if_changed()
        async with following(node) as followed:
            yield followed


async def test_first_reader_finds_the_current_state(followed: Followed) -> None:
    node = followed.node
    topic = await node.create_topic("orders", 2)
    await followed.commit(topic, 5, group_id="simple", partition=1)
    one, two = node.member(G, "a", group_instance_id="static"), node.member(G, "b")
    await settle(one, two)
    followed.logs.seen(CONSUMER_OFFSETS)
    await followed.logs.run()
    begun, settled = [told_by(record) for record in await followed.written(CONSUMER_OFFSETS, G)]
    assert begun[1] == settled[1] == log.GroupMetadataKey(group=G)
    assert begun[2].generation == 0
    assert (begun[2].protocol_type, begun[2].protocol, begun[2].leader, begun[2].members) == ("", None, None, ())
    value = settled[2]
    assert (value.generation, value.protocol_type, value.protocol, value.leader) == (
        one.generation_id,
        "consumer",
        "range",
        one.member_id,
    )
    assert [(member.member_id, member.group_instance_id, member.subscription) for member in value.members] == [
        (one.member_id, "static", b"subscription"),
        (two.member_id, None, b"subscription"),
    ]
    assert [member.assignment for member in value.members] == [one.member_id.encode(), two.member_id.encode()]
    ((kind, key, offset),) = [told_by(record) for record in await followed.written(CONSUMER_OFFSETS, "simple")]
    assert (kind, key) == (log.OFFSET_COMMIT, log.OffsetCommitKey(group="simple", topic="orders", partition=1))
    assert (offset.offset, offset.leader_epoch, offset.metadata, offset.topic_id) == (5, -1, "m", topic.topic_id)
    assert followed.told == [f"{CONSUMER_OFFSETS} 600"]


async def test_only_changes_are_written(followed: Followed) -> None:
    topic = await followed.node.create_topic("orders", 2)
    await followed.commit(topic, 1)
    await followed.commit(topic, 1, partition=1)
    followed.logs.seen(CONSUMER_OFFSETS)
    await followed.logs.run()
    end = await followed.end(CONSUMER_OFFSETS, G)
    assert end == 2
    await followed.commit(topic, 8, partition=1)
    await followed.logs.run()
    ((_, key, value),) = [told_by(each) for each in await followed.written(CONSUMER_OFFSETS, G, behind=end)]
    assert (key.partition, value.offset) == (1, 8)


async def test_deleted_state_is_written_as_a_tombstone(followed: Followed) -> None:
    """A group's deletion is announced. The writer finds an expired group in its next complete read. Any node may have
    deleted the group.
    """
    topic = await followed.node.create_topic("orders", 1)
    await followed.commit(topic, 1)
    await followed.commit(topic, 1, group_id="other")
    member = followed.node.member(G, "a")
    followed.logs.seen(CONSUMER_OFFSETS)
    await followed.logs.run()
    await settle(member)
    await followed.logs.run()
    end = await followed.end(CONSUMER_OFFSETS, G)
    await reply_of(member.leave())
    lease = followed.node.leases.lease_for(G)
    assert lease is not None
    await followed.node.store.delete(G, lease)
    other = followed.node.leases.lease_for("other")
    assert other is not None
    await followed.node.offsets.delete("other", [(topic.topic_id, 0)], other)
    followed.logs.shards_moved()
    await followed.logs.run()
    gone = [told_by(each) for each in await followed.written(CONSUMER_OFFSETS, G, behind=end)]
    assert {kind for kind, key, value in gone if value is None} == {log.OFFSET_COMMIT, log.GROUP_METADATA}
    assert told_by((await followed.written(CONSUMER_OFFSETS, "other"))[-1])[2] is None


async def test_a_group_in_a_rebalance_keeps_its_record(followed: Followed) -> None:
    one, two = followed.node.member(G, "a"), followed.node.member(G, "b")
    await settle(one)
    followed.logs.seen(CONSUMER_OFFSETS)
    await followed.logs.run()
    end = await followed.end(CONSUMER_OFFSETS, G)
    joins = [two.join(), one.join()]
    await asyncio.gather(*joins)
    followed.logs.shards_moved()
    await followed.logs.run()
    assert await followed.end(CONSUMER_OFFSETS, G) == end, "it is not settled"
    syncs = [one.sync(dict.fromkeys(one.members, b"x")), two.sync()]
    for sync in syncs:
        await reply_of(sync)
    await followed.logs.run()
    ((_, _, value),) = [told_by(each) for each in await followed.written(CONSUMER_OFFSETS, G, behind=end)]
    assert value.generation == one.generation_id
    assert len(value.members) == 2


async def test_group_that_cannot_be_read_does_not_stop_the_others(followed: Followed) -> None:
    """A newer release may have stored it. Its records stay as they are."""
    topic = await followed.node.create_topic("orders")
    await settle(followed.node.member(G, "a"))
    await followed.commit(topic, 1, group_id="other")
    followed.logs.seen(CONSUMER_OFFSETS)
    await followed.logs.run()
    end = await followed.end(CONSUMER_OFFSETS, G)
    await followed.node.database.hot.fetch("update consumer_group set group_type = 'future' where group_id = $1", G)
    await followed.commit(topic, 2, group_id="other")
    followed.logs.shards_moved()
    await followed.logs.run()
    assert [told_by(each)[2].offset for each in await followed.written(CONSUMER_OFFSETS, "other")] == [1, 2]
    assert await followed.end(CONSUMER_OFFSETS, G) == end


async def test_consumer_group_is_written(followed: Followed) -> None:
    node = followed.node
    topic = await node.create_topic("orders", 2)
    await node.services.catalog.refresh_if_changed()
    followed.logs.seen(CONSUMER_OFFSETS)
    await followed.logs.run()
    beat = ConsumerGroupHeartbeat(
        node.groups.next_request_id(),
        ConnectionId("c"),
        1,
        1,
        "client",
        "/127.0.0.1",
        MemberId("m"),
        MemberId("m"),
        0,
        rebalance_timeout_ms=1_000,
        subscribed_topic_names=(topic.name,),
        owned={},
    )
    assert (await reply_of(node.groups.submit(G, beat))).error == 0
    await followed.logs.run()
    said = {kind: value for kind, _, value in map(told_by, await followed.written(CONSUMER_OFFSETS, G))}
    member = said[log.CONSUMER_MEMBER]
    assert (member.client_id, member.subscribed_topic_names, member.rebalance_timeout_ms) == (
        "client",
        ("orders",),
        1_000,
    )
    epoch = said[log.CONSUMER_GROUP].epoch
    assert epoch > 0
    assert said[log.CONSUMER_ASSIGNMENT].member_epoch == said[log.CONSUMER_TARGET_EPOCH].assignment_epoch == epoch
    assert log.CONSUMER_TARGET in said


async def test_next_writer_writes_the_difference(followed: Followed) -> None:
    """The log has the records that the previous node wrote. The next node writes the difference between them and the
    tables.
    """
    topic = await followed.node.create_topic("orders", 2)
    await followed.commit(topic, 1)
    await followed.commit(topic, 1, partition=1)
    followed.logs.seen(CONSUMER_OFFSETS)
    await followed.logs.run()
    end = await followed.end(CONSUMER_OFFSETS, G)
    async with following(followed.node) as successor:
        successor.logs.heard(f"{CONSUMER_OFFSETS} 600")
        await successor.logs.run()
        assert await followed.end(CONSUMER_OFFSETS, G) == end, "nothing is new"
        assert successor.told == [], "whoever reads tells"
    await followed.commit(topic, 2)
    async with following(followed.node) as successor:
        successor.logs.heard(f"{CONSUMER_OFFSETS} 600")
        await successor.logs.run()
    ((_, _, value),) = [told_by(each) for each in await followed.written(CONSUMER_OFFSETS, G, behind=end)]
    assert value.offset == 2


async def test_late_record_of_a_former_coordinator_is_corrected(followed: Followed) -> None:
    topic = await followed.node.create_topic("orders", 1)
    await followed.commit(topic, 9)
    followed.logs.seen(CONSUMER_OFFSETS)
    await followed.logs.run()
    (record,) = await followed.written(CONSUMER_OFFSETS, G)
    assert record.key is not None
    late = log.encode_value(log.OFFSET_COMMIT, 4, log.OffsetCommitValue(offset=3, topic_id=topic.topic_id))
    offsets = followed.node.services.catalog.get(CONSUMER_OFFSETS)
    assert offsets is not None
    key = offsets.partitions[partition_of(G, OFFSETS_PARTITIONS)].partition_key
    batch = build_batch([Record(0, 1, record.key, late)])
    await followed.appender.submit(NewBatch(key, bytearray(batch), 1, 1))
    followed.logs.shards_moved()
    await followed.logs.run()
    assert [told_by(each)[2].offset for each in await followed.written(CONSUMER_OFFSETS, G)] == [9, 3, 9]


async def test_recreated_topic_is_written_anew(followed: Followed) -> None:
    topic = await followed.node.create_topic("orders", 1)
    await followed.commit(topic, 9)
    followed.logs.seen(CONSUMER_OFFSETS)
    await followed.logs.run()
    catalog = followed.node.services.catalog
    former = catalog.get(CONSUMER_OFFSETS)
    assert former is not None
    await followed.node.topics.delete(former.topic_id)
    await catalog.refresh_if_changed()
    followed.logs.shards_moved()
    await followed.logs.run()
    await followed.node.topics.create([plan_internal(CONSUMER_OFFSETS, BrokerConfig())])
    await catalog.refresh_if_changed()
    followed.logs.shards_moved()
    await followed.logs.run()
    assert [told_by(each)[2].offset for each in await followed.written(CONSUMER_OFFSETS, G)] == [9]


async def test_transactions_are_written_as_they_proceed(followed: Followed) -> None:
    transactions = followed.node.services.transactions
    topic = await followed.node.create_topic("orders", 2)
    followed.logs.seen(TRANSACTION_STATE)
    await followed.logs.run()
    producer = await transactions.initialize("t", InitProducer(60_000))
    await followed.logs.run()
    keys = [partition.partition_key for partition in topic.partitions]
    await transactions.add("t", producer.producer_id, producer.producer_epoch, keys, [G])
    await followed.logs.run()
    await transactions.end("t", producer.producer_id, producer.producer_epoch, committed=True)
    await followed.logs.run()
    empty, ongoing, complete = map(told_of_transaction, await followed.written(TRANSACTION_STATE, "t"))
    assert [each.transaction_status for each in (empty, ongoing, complete)] == [0, 1, 4]
    assert {each.producer_id for each in (empty, ongoing, complete)} == {producer.producer_id}
    assert {each.previous_producer_id for each in (empty, ongoing, complete)} == {producer.producer_id}
    assert empty.transaction_partitions is None
    assert empty.transaction_timeout_ms == 60_000
    assert [(each.topic, each.partition_ids) for each in ongoing.transaction_partitions] == [
        ("orders", (0, 1)),
        (CONSUMER_OFFSETS, (partition_of(G, OFFSETS_PARTITIONS),)),
    ]
    assert ongoing.transaction_start_timestamp_ms > 0
    assert complete.transaction_partitions == ()
    assert [each.transaction_start_timestamp_ms for each in (empty, complete)] == [
        -1,
        ongoing.transaction_start_timestamp_ms,
    ]


async def test_later_reader_of_transactions_finds_their_beginning(followed: Followed) -> None:
    transactions = followed.node.services.transactions
    producer = await transactions.initialize("t", InitProducer(60_000))
    await transactions.add("t", producer.producer_id, producer.producer_epoch, [])
    await transactions.end("t", producer.producer_id, producer.producer_epoch, committed=False)
    followed.logs.seen(TRANSACTION_STATE)
    await followed.logs.run()
    found = [told_of_transaction(each) for each in await followed.written(TRANSACTION_STATE, "t")]
    assert [each.transaction_status for each in found] == [0, 5]


async def test_record_names_the_producer_id_that_was_replaced(followed: Followed) -> None:
    transactions = followed.node.services.transactions
    first = await transactions.initialize("t", InitProducer(60_000))
    await followed.node.database.hot.fetch(
        "update transactional_producer set producer_epoch = $1 where transactional_id = 't'", EXHAUSTED_FROM_EPOCH
    )
    followed.logs.seen(TRANSACTION_STATE)
    await transactions.add("t", first.producer_id, EXHAUSTED_FROM_EPOCH, [])
    second = await transactions.end("t", first.producer_id, EXHAUSTED_FROM_EPOCH, committed=True, raise_epoch=True)
    assert second.producer_id != first.producer_id
    await followed.logs.run()
    await transactions.add("t", second.producer_id, second.producer_epoch, [])
    await followed.logs.run()
    found = [told_of_transaction(each) for each in await followed.written(TRANSACTION_STATE, "t")]
    assert [(each.transaction_status, each.previous_producer_id) for each in found] == [
        (0, first.producer_id),
        (4, first.producer_id),
        (1, second.producer_id),
    ]


async def test_writing_ends_without_readers(followed: Followed) -> None:
    readers = followed.node.groups.readers
    followed.logs.seen(CONSUMER_OFFSETS)
    followed.logs.seen(TRANSACTION_STATE)
    await followed.logs.run()
    assert len(readers) == 1
    assert followed.node.services.transactions.is_followed
    followed.logs.heard(f"{CONSUMER_OFFSETS} 0")
    followed.logs.heard(f"{TRANSACTION_STATE} 0")
    followed.logs.shards_moved()
    await followed.logs.run()
    assert readers == []
    assert not followed.node.services.transactions.is_followed
    followed.logs.heard("orders 600")
    followed.logs.heard("__share_group_state 600")
    assert readers == [], "of these nothing is written"


async def test_queue_of_records_is_bounded(followed: Followed) -> None:
    topic = await followed.node.create_topic("orders", 1)
    async with following(followed.node, Bounds(changed=1)) as bounded:
        bounded.logs.seen(CONSUMER_OFFSETS)
        await bounded.logs.run()
        groups = [f"g{number}" for number in range(4)]
        for group_id in groups:
            await followed.commit(topic, 1, group_id=group_id)
        await bounded.logs.run()
        for group_id in groups:
            assert await followed.written(CONSUMER_OFFSETS, group_id), "all are looked at where too many have changed"


async def test_state_beyond_the_memory_bound_is_not_written(followed: Followed) -> None:
    topic = await followed.node.create_topic("orders", 2)
    await followed.commit(topic, 1)
    await followed.commit(topic, 1, partition=1)
    async with following(followed.node, Bounds(keys=1)) as bounded:
        bounded.logs.seen(CONSUMER_OFFSETS)
        await bounded.logs.run()
        end = await followed.end(CONSUMER_OFFSETS, G)
        await followed.commit(topic, 2)
        await bounded.logs.run()
        assert await followed.end(CONSUMER_OFFSETS, G) == end
        await bounded.logs.ready(CONSUMER_OFFSETS)


async def test_request_for_the_end_waits_for_the_first_pass(followed: Followed) -> None:
    topic = await followed.node.create_topic("orders", 1)
    await followed.commit(topic, 1)
    asking = asyncio.create_task(followed.logs.ready(CONSUMER_OFFSETS))
    await asyncio.sleep(0)
    assert not asking.done()
    await followed.logs.run()
    await asking
    assert await followed.end(CONSUMER_OFFSETS, G) == 1


async def test_requests_for_the_end_alone_cause_one_write_per_hour(followed: Followed) -> None:
    """Exporters request the ends of all topics every few seconds. These requests must not slow down commits."""
    readers = followed.node.groups.readers
    async with following(followed.node, Bounds(asked_s=0.0)) as asked:
        asking = asyncio.create_task(asked.logs.ready(CONSUMER_OFFSETS))
        await asyncio.sleep(0)
        assert len(readers) == 1
        asking.cancel()
        await asked.logs.run()
        assert readers == [], "nobody has read it"
        await asked.logs.ready(CONSUMER_OFFSETS)
        assert readers == [], "not again so soon"
        asked.logs.seen(CONSUMER_OFFSETS)
        await asked.logs.run()
        assert len(readers) == 1, "who reads is written for at once"
        assert asked.told[-1] == f"{CONSUMER_OFFSETS} 600"


async def test_another_node_writes_as_long_as_it_is_notified(followed: Followed) -> None:
    readers = followed.node.groups.readers
    for payload in (f"{CONSUMER_OFFSETS}", f"{CONSUMER_OFFSETS} soon"):
        followed.logs.heard(payload)
        assert readers == []
    followed.logs.heard(f"{CONSUMER_OFFSETS} 0")
    await followed.logs.run()
    assert readers == [], "for no time at all"
    followed.logs.heard(f"{CONSUMER_OFFSETS} 60")
    await followed.logs.run()
    assert len(readers) == 1


async def test_deleted_records_are_written_again(followed: Followed) -> None:
    topic = await followed.node.create_topic("orders", 1)
    await followed.commit(topic, 9)
    followed.logs.seen(CONSUMER_OFFSETS)
    await followed.logs.run()
    offsets = followed.node.services.catalog.get(CONSUMER_OFFSETS)
    assert offsets is not None
    await followed.log.delete_records(offsets.partitions[partition_of(G, OFFSETS_PARTITIONS)].partition_key, 1)
    followed.logs.shards_moved()
    await followed.logs.run()
    (record,) = await followed.written(CONSUMER_OFFSETS, G, behind=1)
    assert (record.offset, told_by(record)[2].offset) == (1, 9)


async def test_in_another_history_the_log_is_read_again(followed: Followed) -> None:
    topic = await followed.node.create_topic("orders", 1)
    await followed.commit(topic, 9)
    followed.logs.seen(CONSUMER_OFFSETS)
    await followed.logs.run()
    followed.logs.forget()
    await followed.logs.run()
    assert len(await followed.written(CONSUMER_OFFSETS, G)) == 1


async def test_offsets_of_a_large_group_are_read_in_parts(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of deleted topics are read in the same parts. No records are written for them."""
    pages: list[int] = []
    fetch = followed.node.database.cold.fetch

    async def counted(query: str, *arguments: object) -> Sequence[Row]:
        rows = await fetch(query, *arguments)
        if query == statement("offsets_behind"):
            pages.append(len(rows))
        return rows

    monkeypatch.setattr(followed.node.database.cold, "fetch", counted)
    topics = [await followed.node.create_topic(name, 3) for name in ("a", "b", "c")]
    for topic in topics:
        for partition in range(3):
            await followed.commit(topic, 7, group_id="large", partition=partition)
    await followed.commit(topics[0], 7, group_id="small", partition=0)
    await followed.node.topics.delete(topics[1].topic_id)
    async with following(followed.node, offset_pages=OffsetPages(batch=3, group=3)) as paged:
        paged.logs.seen(CONSUMER_OFFSETS)
        await paged.logs.run()
    told = [told_by(record) for record in await followed.written(CONSUMER_OFFSETS, "large")]
    assert sorted((key.topic, key.partition, value.offset) for _, key, value in told) == [
        (name, partition, 7) for name in ("a", "c") for partition in range(3)
    ]
    assert pages == [1, 3, 3, 3, 0] or pages == [3, 3, 3, 0, 1], "each by itself"
    assert len(await followed.written(CONSUMER_OFFSETS, "small")) == 1
