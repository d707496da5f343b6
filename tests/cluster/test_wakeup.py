"""An event on one node is visible on another node at once. The test uses only frames, so no client library retries."""

from __future__ import annotations

import asyncio
import statistics
import time

from protocol.errors import ErrorCode
from protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from protocol.messages.delete_records import DeleteRecordsPartition, DeleteRecordsRequest, DeleteRecordsTopic
from protocol.messages.delete_topics import DeleteTopicsRequest
from protocol.messages.metadata import MetadataRequest
from tests.cluster.conftest import QUICK_TTL, TTL_S, Cluster, metric
from tests.cluster.records import ROUNDS, delays, fetch, produce
from tests.frames.members import create_topic, fresh
from tests.steps.waiting import until
from tests.wire import WireClient


async def test_a_reader_on_another_node_is_a_few_milliseconds_behind(cluster: Cluster) -> None:
    a, b = cluster(2, environment=QUICK_TTL)
    async with await WireClient.connect(a.bootstrap) as on_a, await WireClient.connect(b.bootstrap) as on_b:
        topic, early = fresh("t"), fresh("early")
        await create_topic(on_a, topic)
        await create_topic(on_a, early)

        async def heard() -> bool:
            await on_a.send(produce(early), 9)
            return metric(b, "sluice_wakeups_heard_total") > 0

        # Right after its start a node is not known to all other nodes. Until then they send it no announcements.
        await until(heard, "the second node hears of appends")
        local = statistics.median(await delays(on_a, on_a, topic, 0))
        remote = statistics.median(await delays(on_a, on_b, topic, ROUNDS))
    print(f"p50 behind the acknowledgement: local {local * 1000:.1f} ms, other node {remote * 1000:.1f} ms")
    assert remote - local < 0.05, (local, remote)


async def test_idle_fetches_on_two_nodes_cost_no_query_each(cluster: Cluster) -> None:
    a, b = cluster(2, environment=QUICK_TTL)
    topic = fresh("t")
    async with await WireClient.connect(a.bootstrap) as on_a:
        await create_topic(on_a, topic)
        await on_a.send(produce(topic), 9)
        await asyncio.sleep(TTL_S + 1.0)  # By then each node is known to the other.
        clients = [await WireClient.connect(node.bootstrap) for node in (a, b) for _ in range(20)]
        try:
            before = time.monotonic()
            for _ in range(6):
                await asyncio.gather(*(client.send(fetch(topic, 1, max_wait_ms=500), 11) for client in clients))
            assert time.monotonic() - before > 2.9
        finally:
            for client in clients:
                await client.close()
    for node in (a, b):
        assert metric(node, "sluice_wakeups_missed_total") == 0
        assert metric(node, "sluice_reconcile_passes_skipped_total") > 0


async def test_a_topic_created_on_one_node_is_served_by_the_other_at_once(cluster: Cluster) -> None:
    a, b = cluster(2)
    async with await WireClient.connect(a.bootstrap) as on_a, await WireClient.connect(b.bootstrap) as on_b:
        for number in range(100):
            topic = fresh(f"race-{number}")
            # The other node has already looked the name up, before such a topic existed.
            asked = await on_b.send(produce(topic), 9)
            assert asked.responses[0].partition_responses[0].error_code == 3
            await on_a.send(
                CreateTopicsRequest(topics=(CreatableTopic(name=topic, num_partitions=1, replication_factor=1),)), 5
            )
            answer = await on_b.send(produce(topic), 9)
            assert answer.responses[0].partition_responses[0].error_code == 0, number


async def test_topics_appear_and_disappear_on_every_node_within_a_moment(cluster: Cluster) -> None:
    nodes = cluster(3)
    took: list[float] = []
    clients = [await WireClient.connect(node.bootstrap) for node in nodes]
    try:
        for number in range(20):
            topic = fresh(f"seen-{number}")
            await clients[0].send(
                CreateTopicsRequest(topics=(CreatableTopic(name=topic, num_partitions=3, replication_factor=1),)), 5
            )
            started = time.monotonic()
            for client in clients[1:]:
                answer = await client.send(MetadataRequest(topics=None), 9)
                assert topic in {found.name for found in answer.topics}
            took.append(time.monotonic() - started)
            waiting = clients[1].send_nowait(fetch(topic, 0, max_wait_ms=60_000), 11)
            await asyncio.sleep(0.02)
            started = time.monotonic()
            await clients[0].send(DeleteTopicsRequest(topic_names=(topic,)), 5)
            ended = await waiting
            assert ended.responses[0].partitions[0].error_code == 3
            assert time.monotonic() - started < 30.0, "a long poll on a deleted topic ends"
    finally:
        for client in clients:
            await client.close()
    print(f"visible on all nodes: longest of {len(took)} {max(took) * 1000:.0f} ms")


async def test_records_deleted_through_one_node_are_soon_gone_on_another(cluster: Cluster) -> None:
    """The other node has appended the records, and holds them in memory."""
    a, b = cluster(2)
    async with await WireClient.connect(a.bootstrap) as on_a, await WireClient.connect(b.bootstrap) as on_b:
        topic = fresh("t")
        await create_topic(on_a, topic)

        async def code() -> int:
            answer = await on_b.send(fetch(topic, 0, max_wait_ms=0), 11)
            return answer.responses[0].partitions[0].error_code

        await on_b.send(produce(topic), 9)
        assert await code() == ErrorCode.NONE
        all_of_it = DeleteRecordsPartition(partition_index=0, offset=-1)
        asked = DeleteRecordsTopic(name=topic, partitions=(all_of_it,))
        await on_a.send(DeleteRecordsRequest(topics=(asked,), timeout_ms=10_000), 2)
        await until(code, "the record is gone", holds=lambda found: found == ErrorCode.OFFSET_OUT_OF_RANGE)
