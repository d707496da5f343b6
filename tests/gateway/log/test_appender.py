"""Group commit on a real Postgres: grouping, limits, order, back-pressure, durability before
visibility, lost storage.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from gateway.log import gathering
from gateway.log.appender import Appender
from gateway.log.gathering import ENOUGH_BYTES
from protocol.records import read_head
from storage.errors import StorageUnavailable
from storage.types import Appended, NewBatch, PartitionKey, Refusal, Topic
from tests.gateway.data_plane import (
    DataPlane,
    batch_of,
    batch_of_size,
    data_plane,
    locked_partition,
    offsets_in,
    records_in,
    terminate_backends,
)
from tests.steps.waiting import turns, until_blocked


@pytest.fixture
async def node(database_url: str) -> AsyncIterator[DataPlane]:
    async with data_plane(database_url) as node:
        yield node


def new_batch(topic: Topic, records: bytes, partition: int = 0) -> NewBatch:
    head = read_head(records)
    return NewBatch(
        partition_key=topic.partitions[partition].partition_key,
        records=bytearray(records),
        record_count=head.records_count,
        max_timestamp_ms=head.max_timestamp,
        producer_id=head.producer_id,
        producer_epoch=head.producer_epoch,
        base_sequence=head.base_sequence,
    )


def appended(result: Appended | Refusal) -> int:
    assert isinstance(result, Appended), result
    return result.base_offset


async def test_a_lone_batch_is_committed_at_once(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    assert appended(await node.appender.submit(new_batch(topic, batch_of(b"a")))) == 0
    assert [batches for batches, _ in node.commits] == [1]


async def test_batches_during_a_commit_share_the_next(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        first = node.appender.submit(new_batch(topic, batch_of(b"0")))
        await until_blocked(connection)
        rest = [node.appender.submit(new_batch(topic, batch_of(b"%d" % number))) for number in range(1, 51)]
    results = await asyncio.gather(first, *rest)
    assert [appended(result) for result in results] == list(range(51))
    assert [batches for batches, _ in node.commits] == [1, 50]


async def test_commit_is_bounded_in_batches_and_bytes(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    appender = Appender(
        node.log,
        node.tail,
        max_commit_batches=3,
        max_commit_bytes=10_000,
        observe_commit=lambda batches, size_bytes, _: node.commits.append((batches, size_bytes)),
    )
    sizes = [1000, *[200] * 7, 6000, 4000, 4001, 50_000, 200]
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        futures = [appender.submit(new_batch(topic, batch_of_size(sizes[0])))]
        await until_blocked(connection)
        futures += [appender.submit(new_batch(topic, batch_of_size(size))) for size in sizes[1:]]
    assert [appended(result) for result in await asyncio.gather(*futures)] == list(range(len(sizes)))
    assert node.commits == [
        (1, 1000),
        (3, 600),
        (3, 600),
        (2, 6200),
        (2, 8001),
        (1, 50_000),
        (1, 200),
    ]


FOR_EVER_S = 3600.0
"""A wait that would end by itself only long after the test."""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commits always wait for more requests. Otherwise they would not wait for the test's own requests, which
    arrive seldom on a busy machine.
    """
    monkeypatch.setattr(gathering, "WORTH_COMMITS", 1e9)


def gathering_appender(node: DataPlane, gather_s: float) -> Appender:
    return Appender(
        node.log,
        node.tail,
        gather_s=gather_s,
        observe_commit=lambda batches, size_bytes, _: node.commits.append((batches, size_bytes)),
    )


@contextlib.contextmanager
def commits_held(node: DataPlane) -> Iterator[asyncio.Event]:
    """Keep every begun commit waiting until the event is set."""
    append, may_end = node.log.append, asyncio.Event()

    async def held(batches: Sequence[NewBatch], *, wait: bool) -> list[Appended | Refusal]:
        await may_end.wait()
        return await append(batches, wait=wait)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node.log, "append", held)
        yield may_end


async def meet(node: DataPlane, appender: Appender, topic: Topic, requests: int) -> None:
    """Submit this many requests of one batch each while another commit is in progress. They all
    share the next commit.
    """
    with commits_held(node) as may_end:
        futures = [appender.submit(new_batch(topic, batch_of(b"m")))]
        await asyncio.sleep(0)
        futures += [appender.submit(new_batch(topic, batch_of(b"m"))) for _ in range(requests)]
        may_end.set()
        await asyncio.wait_for(asyncio.gather(*futures), 10)
    assert [batches for batches, _ in node.commits] == [1, requests]
    node.commits.clear()


async def test_lone_client_does_not_wait(node: DataPlane) -> None:
    topic = await node.create_topic("t", 3)
    appender = gathering_appender(node, FOR_EVER_S)
    for partitions in (3, 1, 2, 1):
        request = object()
        futures = [
            appender.submit(new_batch(topic, batch_of(b"a"), index), request=request) for index in range(partitions)
        ]
        await asyncio.wait_for(asyncio.gather(*futures), 10)
    assert [batches for batches, _ in node.commits] == [3, 1, 2, 1]


@pytest.mark.usefixtures("patient")
async def test_requests_that_met_share_the_next_commit(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    appender = gathering_appender(node, FOR_EVER_S)
    await meet(node, appender, topic, 3)
    request = object()
    futures = [appender.submit(new_batch(topic, batch_of(b"a")), request)]
    await asyncio.sleep(0)
    futures.append(appender.submit(new_batch(topic, batch_of(b"a")), request))
    futures.append(appender.submit(new_batch(topic, batch_of(b"b"))))
    done, _ = await asyncio.wait(futures, timeout=0.1)
    assert not done, "two of the three that met: their commit waits"
    futures.append(appender.submit(new_batch(topic, batch_of(b"c"))))
    await asyncio.wait_for(asyncio.gather(*futures), 10)
    assert [batches for batches, _ in node.commits] == [4], "begun when the third came, long before its time was up"


@pytest.mark.usefixtures("patient")
async def test_commit_waits_for_requests_left_out_before(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    appender = gathering_appender(node, FOR_EVER_S)
    with commits_held(node) as may_end:
        alone = appender.submit(new_batch(topic, batch_of(b"a")))
        await asyncio.sleep(0)
        left = appender.submit(new_batch(topic, batch_of(b"b")))
        may_end.set()
        await asyncio.wait_for(alone, 10)
    done, _ = await asyncio.wait([left], timeout=0.1)
    assert not done, "it met another that was in the commit before: one more may come"
    another = appender.submit(new_batch(topic, batch_of(b"c")))
    await asyncio.wait_for(asyncio.gather(left, another), 10)
    assert [batches for batches, _ in node.commits] == [1, 2]


@pytest.mark.usefixtures("patient")
async def test_commit_with_enough_bytes_does_not_wait(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    appender = gathering_appender(node, FOR_EVER_S)
    await meet(node, appender, topic, 3)
    small = appender.submit(new_batch(topic, batch_of(b"a")))
    await asyncio.sleep(0)
    large = appender.submit(new_batch(topic, batch_of_size(ENOUGH_BYTES)))
    await asyncio.wait_for(asyncio.gather(small, large), 10)
    assert [batches for batches, _ in node.commits] == [2]


@pytest.mark.usefixtures("patient")
async def test_a_commit_waits_no_longer_than_its_bound(node: DataPlane) -> None:
    topic = await node.create_topic("t")
    appender = gathering_appender(node, 0.2)
    await meet(node, appender, topic, 2)
    await asyncio.wait_for(appender.submit(new_batch(topic, batch_of(b"a"))), 10)
    assert [batches for batches, _ in node.commits] == [1]
    assert await appender.drain(10)


async def test_the_order_of_submit_is_the_order_of_the_log(node: DataPlane) -> None:
    """The order holds across committers and groups, for small batches and for batches that are written by COPY."""
    topic = await node.create_topic("t", 5)
    chance = random.Random(3)
    submitted: dict[int, list[bytes]] = {index: [] for index in range(5)}
    futures: list[asyncio.Future[Appended | Refusal]] = []
    for number in range(400):
        index = chance.randrange(5)
        value = b"%d" % number + b"." * chance.choice([0, 0, 0, 100, 90_000])
        submitted[index].append(value)
        futures.append(node.appender.submit(new_batch(topic, batch_of(value), index)))
        if chance.random() < 0.1:
            await asyncio.sleep(0)
    await asyncio.gather(*futures)
    for index, values in submitted.items():
        for forgotten in (False, True):
            if forgotten:
                node.tail.forget(topic.partitions[index].partition_key)
            found = await node.fetch_one(topic, 0, partition=index, partition_max_bytes=2**30)
            assert [record.value for record in records_in(found)] == values
            assert offsets_in(found) == list(range(len(values)))


async def test_refused_batch_does_not_fail_its_commit(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        first = node.appender.submit(new_batch(topic, batch_of(b"0", producer=(7, 0, 0))))
        await until_blocked(connection)
        gap = node.appender.submit(new_batch(topic, batch_of(b"x", producer=(7, 0, 9))))
        ghost = node.appender.submit(
            NewBatch(PartitionKey(topic.partitions[0].partition_key + 2), bytearray(batch_of(b"x")), 1, 0)
        )
        last = node.appender.submit(new_batch(topic, batch_of(b"1", producer=(7, 0, 1))))
    assert await asyncio.gather(first, gap, ghost, last) == [
        Appended(0, 0, 0),
        Refusal.OUT_OF_ORDER_SEQUENCE,
        Refusal.UNKNOWN_PARTITION,
        Appended(1, 0, 0),
    ]


async def test_records_are_invisible_before_they_are_durable(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    key = topic.partitions[0].partition_key
    assert offsets_in(await node.fetch_one(topic, 0)) == []
    async with locked_partition(database_url, key) as connection:
        future = node.appender.submit(new_batch(topic, batch_of(b"a")))
        await until_blocked(connection)
        during = await node.fetch_one(topic, 0)
        assert (offsets_in(during), during.high_watermark) == ([], 0)
    await future
    found = node.tail.read(key, 0, 10**6, at_least_one=True, now_s=0)
    assert found is not None
    assert len(found.batches) == 1, "in the tail as soon as it is acknowledged"


async def test_queued_bytes_are_released(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    async with locked_partition(database_url, topic.partitions[0].partition_key):
        futures = [node.appender.submit(new_batch(topic, batch_of_size(600))) for _ in range(2)]
        assert node.appender.queued_bytes == 1200
    await asyncio.gather(*futures)
    assert node.appender.queued_bytes == 0


async def test_drain_finishes_queued_batches(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        futures = [node.appender.submit(new_batch(topic, batch_of(b"a"))) for _ in range(3)]
        await until_blocked(connection)
        assert not await node.appender.drain(0.01)
        draining = asyncio.create_task(node.appender.drain(10))
        await asyncio.sleep(0)
        assert not draining.done()
    assert await draining
    assert all(future.done() for future in futures)


async def test_cancelled_append_does_not_disturb_its_commit(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        first = node.appender.submit(new_batch(topic, batch_of(b"0")))
        await until_blocked(connection)
        gone = node.appender.submit(new_batch(topic, batch_of(b"1")))
        last = node.appender.submit(new_batch(topic, batch_of(b"2")))
        gone.cancel()
        first.cancel()
    assert appended(await last) == 1, "what had not begun is not written: its producer repeats it"
    assert [record.value for record in records_in(await node.fetch_one(topic, 0))] == [b"0", b"2"]
    assert node.appender.queued_bytes == 0


async def test_lost_storage_fails_the_commit_and_not_the_next(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        during = node.appender.submit(new_batch(topic, batch_of(b"0")))
        await until_blocked(connection)
        queued = node.appender.submit(new_batch(topic, batch_of(b"1")))
        await terminate_backends(connection)
        with pytest.raises(StorageUnavailable):
            await during
    loop = asyncio.get_running_loop()
    max_age_s = node.tail.max_age_s(loop.time())
    assert max_age_s < float("inf"), "it may have been committed all the same"
    assert appended(await queued) == 0
    assert node.appender.queued_bytes == 0


async def test_idempotent_batch_is_not_written_without_its_predecessors(node: DataPlane, database_url: str) -> None:
    """A partition accepts any first sequence of an unknown producer. If the second batch were written alone, the first
    batch would be refused when it is repeated.
    """
    topic = await node.create_topic("t")
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        sent = [batch_of(b"%d" % sequence, producer=(7, 0, sequence)) for sequence in range(4)]
        during = node.appender.submit(new_batch(topic, sent[0]))
        await until_blocked(connection)
        queued = [node.appender.submit(new_batch(topic, batch)) for batch in sent[1:]]
        others = [
            node.appender.submit(new_batch(topic, batch_of(b"other", producer=producer)))
            for producer in ((8, 0, 0), (-1, -1, -1))
        ]
        await terminate_backends(connection)
        assert all(isinstance(error, StorageUnavailable) for error in await gather_errors(during, *queued))
    assert [appended(result) for result in await asyncio.gather(*others)] == [0, 1]
    repeated = [node.appender.submit(new_batch(topic, batch)) for batch in sent]
    assert [appended(result) for result in await asyncio.gather(*repeated)] == [2, 3, 4, 5]
    assert node.appender.queued_bytes == 0


async def test_cancelled_batch_refuses_later_ones_until_its_repeat(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")

    def submit(producer_id: int, epoch: int, sequence: int) -> asyncio.Future[Appended | Refusal]:
        return node.appender.submit(new_batch(topic, batch_of(b"v", producer=(producer_id, epoch, sequence))))

    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        kept = [submit(7, 0, 0)]
        await until_blocked(connection)
        kept.append(submit(8, 0, 0))
        given_up = [submit(9, 0, 0), submit(9, 0, 1), submit(10, 0, 7)]
        followers = [submit(9, 0, 2)]
        kept.append(submit(8, 0, 1))
        followers.append(submit(10, 0, 8))
        kept += [submit(9, 0, 0), submit(9, 0, 1), submit(10, 1, 0)]
        for outcome in given_up:
            outcome.cancel()
    assert [appended(result) for result in await asyncio.gather(*kept)] == list(range(6))
    assert all(isinstance(error, StorageUnavailable) for error in await gather_errors(*followers))
    assert node.appender.queued_bytes == 0


async def test_batch_after_a_lost_one_is_not_called_out_of_order(node: DataPlane, database_url: str) -> None:
    """After OUT_OF_ORDER_SEQUENCE, librdkafka numbers its batches anew, even if it has already repeated the lost batch.
    If that repeat is written and its answer is lost, the log contains the record twice.
    """
    topic = await node.create_topic("t")
    sent = [batch_of(b"%d" % sequence, producer=(7, 0, sequence)) for sequence in range(4)]
    assert appended(await node.appender.submit(new_batch(topic, sent[0]))) == 0
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        lost = node.appender.submit(new_batch(topic, sent[1]))
        await until_blocked(connection)
        await terminate_backends(connection)
        await gather_errors(lost)
    later = node.appender.submit(new_batch(topic, sent[2]))
    assert isinstance((await gather_errors(later))[0], StorageUnavailable)
    other = node.appender.submit(new_batch(topic, batch_of(b"other", producer=(8, 0, 0))))
    assert appended(await other) == 1
    repeated = [node.appender.submit(new_batch(topic, batch)) for batch in sent[1:]]
    assert [appended(result) for result in await asyncio.gather(*repeated)] == [2, 3, 4]
    assert node.appender.queued_bytes == 0


@pytest.mark.parametrize("first", [0, 2**31 - 1], ids=["from the first sequence", "around the last sequence"])
async def test_repeat_of_a_batch_before_a_lost_one_is_answered(node: DataPlane, database_url: str, first: int) -> None:
    """A slow commit outlasts the request of its batch, and the batch behind it is given up. Java's producer repeats the
    later batch only when the earlier one is answered.
    """
    topic = await node.create_topic("t")

    def submit(number: int) -> asyncio.Future[Appended | Refusal]:
        return node.appender.submit(new_batch(topic, batch_of(b"v", producer=(7, 0, (first + number) % 2**31))))

    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        given_up = [submit(0)]
        await until_blocked(connection)
        given_up.append(submit(1))
        for outcome in given_up:
            outcome.cancel()
        repeated = submit(0)
    assert await repeated == Appended(0, 0, 0, duplicate=True)
    assert await submit(0) == Appended(0, 0, 0, duplicate=True)
    assert isinstance((await gather_errors(submit(2)))[0], StorageUnavailable)
    assert [appended(await submit(number)) for number in (1, 2)] == [1, 2]
    assert node.appender.queued_bytes == 0


async def test_batch_whose_predecessors_another_node_has_written_is_written(node: DataPlane, database_url: str) -> None:
    """The producer has repeated the lost batch at another node, for example while this node was frozen."""
    topic = await node.create_topic("t")
    sent = [batch_of(b"%d" % sequence, producer=(7, 0, sequence)) for sequence in range(5)]
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        lost = node.appender.submit(new_batch(topic, sent[0]))
        await until_blocked(connection)
        await terminate_backends(connection)
        await gather_errors(lost)
    async with data_plane(database_url, name="node-2") as other:
        repeated = [other.appender.submit(new_batch(topic, batch)) for batch in sent[:2]]
        assert [appended(result) for result in await asyncio.gather(*repeated)] == [0, 1]
    early = node.appender.submit(new_batch(topic, sent[3]))
    assert isinstance((await gather_errors(early))[0], StorageUnavailable)
    later = [node.appender.submit(new_batch(topic, batch)) for batch in sent[2:]]
    assert [appended(result) for result in await asyncio.gather(*later)] == [2, 3, 4]
    assert node.appender.queued_bytes == 0


async def test_late_batch_of_an_earlier_epoch_ends_no_wait_for_a_lost_batch(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")

    def submit(epoch: int, sequence: int) -> asyncio.Future[Appended | Refusal]:
        return node.appender.submit(new_batch(topic, batch_of(b"v", producer=(7, epoch, sequence))))

    assert appended(await submit(0, 0)) == 0
    assert appended(await submit(1, 0)) == 1
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        lost = submit(1, 1)
        await until_blocked(connection)
        await terminate_backends(connection)
        await gather_errors(lost)
    assert await submit(0, 1) is Refusal.INVALID_PRODUCER_EPOCH
    assert isinstance((await gather_errors(submit(1, 2)))[0], StorageUnavailable)
    assert [appended(await submit(1, sequence)) for sequence in (1, 2)] == [2, 3]


async def test_new_batch_is_refused_until_all_lost_ones_are_repeated(node: DataPlane, database_url: str) -> None:
    """librdkafka may send a new batch behind the first repeat, before it knows which other batches were not written."""
    topic = await node.create_topic("t")

    def submit(sequence: int) -> asyncio.Future[Appended | Refusal]:
        return node.appender.submit(new_batch(topic, batch_of(b"v", producer=(7, 0, sequence))))

    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        first = submit(0)
        await until_blocked(connection)
        lost, follower = submit(1), submit(2)
        lost.cancel()
        repeated, new = submit(1), submit(3)
    assert [appended(result) for result in await asyncio.gather(first, repeated)] == [0, 1]
    assert all(isinstance(error, StorageUnavailable) for error in await gather_errors(follower, new))
    later = submit(4)
    assert isinstance((await gather_errors(later))[0], StorageUnavailable)
    assert [appended(await submit(sequence)) for sequence in range(2, 6)] == [2, 3, 4, 5]
    assert node.appender.queued_bytes == 0


async def test_lost_batch_that_is_never_repeated_is_forgotten(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    appender = Appender(node.log, node.tail, broken_s=0.0)
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        lost = appender.submit(new_batch(topic, batch_of(b"0", producer=(7, 0, 0))))
        await until_blocked(connection)
        await terminate_backends(connection)
        await gather_errors(lost)
    assert appended(await appender.submit(new_batch(topic, batch_of(b"1", producer=(7, 0, 1))))) == 0


async def test_lost_batches_of_many_producers_are_bounded(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t")
    appender = Appender(node.log, node.tail, max_broken=2)
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        lost = [appender.submit(new_batch(topic, batch_of(b"0", producer=(each, 0, 0)))) for each in range(3)]
        await until_blocked(connection)
        lost += [appender.submit(new_batch(topic, batch_of(b"1", producer=(each, 0, 1)))) for each in range(3)]
        await terminate_backends(connection)
        await gather_errors(*lost)
    later = [appender.submit(new_batch(topic, batch_of(b"1", producer=(each, 0, 1)))) for each in range(3)]
    first, *rest = await gather_errors(*later)
    assert isinstance(first, Appended), "the oldest has been forgotten"
    assert all(isinstance(error, StorageUnavailable) for error in rest)


async def gather_errors(*futures: asyncio.Future[Appended | Refusal]) -> list[object]:
    return list(await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 10))


async def test_two_nodes_append_to_the_same_partitions(node: DataPlane, database_url: str) -> None:
    """In trials, overlapping commits caused deadlocks. Each node's tail must also notice the other node's appends."""
    topic = await node.create_topic("t", 6)
    async with data_plane(database_url, name="node-2") as other:
        chance = random.Random(5)

        async def produce_some(at: DataPlane) -> list[tuple[int, int]]:
            seen: list[tuple[int, int]] = []
            for _ in range(30):
                targets = chance.sample(range(6), 4)
                results = await asyncio.gather(
                    *(at.appender.submit(new_batch(topic, batch_of(b"v"), index)) for index in targets)
                )
                seen += [(index, appended(result)) for index, result in zip(targets, results, strict=True)]
            return seen

        done = await asyncio.gather(*(produce_some(at) for at in (node, other, node, other)))
        places = [place for seen in done for place in seen]
        assert len(places) == len(set(places)) == 4 * 30 * 4
        for index in range(6):
            expected = sorted(offset for partition, offset in places if partition == index)
            assert expected == list(range(len(expected)))
            for at in (node, other):
                assert offsets_in(await at.fetch_one(topic, 0, partition=index, max_wait_ms=0)) == expected


async def test_locked_partition_stops_no_other_of_its_committer(node: DataPlane, database_url: str) -> None:
    topic = await node.create_topic("t", 4)
    await node.appender.submit(new_batch(topic, batch_of(b"before"), 0))
    async with locked_partition(database_url, topic.partitions[0].partition_key) as connection:
        held = [node.appender.submit(new_batch(topic, batch_of(b"0"), 0))]
        await turns(3)  # The commit of this batch has begun, and the others wait behind it.
        held += [node.appender.submit(new_batch(topic, batch_of(b"%d" % number), 0)) for number in (1, 2)]
        for index in (1, 2, 3):
            assert (
                appended(await asyncio.wait_for(node.appender.submit(new_batch(topic, batch_of(b"x"), index)), 3)) == 0
            )
        await until_blocked(connection)
        held.append(node.appender.submit(new_batch(topic, batch_of(b"3"), 0)))
        assert not any(future.done() for future in held)
    assert [appended(await future) for future in held] == [1, 2, 3, 4], "in the order in which they came"
    assert appended(await node.appender.submit(new_batch(topic, batch_of(b"after"), 0))) == 5
    values = [record.value for record in records_in(await node.fetch_one(topic, 0))]
    assert values == [b"before", b"0", b"1", b"2", b"3", b"after"]
    assert node.appender.queued_bytes == 0


async def test_bug_in_a_commit_fails_it_and_queued_batches_are_committed(
    node: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await node.create_topic("t")
    append, begun, broken = node.log.append, asyncio.Event(), asyncio.Event()

    async def break_once(batches: Sequence[NewBatch], *, wait: bool) -> list[Appended | Refusal]:
        if begun.is_set():
            return await append(batches, wait=wait)
        begun.set()
        await broken.wait()
        raise RuntimeError("bug")

    monkeypatch.setattr(node.log, "append", break_once)
    first = node.appender.submit(new_batch(topic, batch_of(b"a")))
    await begun.wait()
    second = node.appender.submit(new_batch(topic, batch_of(b"b")))
    broken.set()
    with pytest.raises(StorageUnavailable):
        await asyncio.wait_for(first, 30)
    assert appended(await asyncio.wait_for(second, 30)) == 0
    assert node.appender.queued_bytes == 0
