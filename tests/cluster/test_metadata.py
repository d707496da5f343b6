"""Topics, partitions and groups that one node creates, changes or deletes, seen by clients of the other nodes."""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections.abc import Sequence

import asyncpg
import pytest
from confluent_kafka import KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    NewPartitions,  # pyright: ignore[reportPrivateImportUsage]
    NewTopic,  # pyright: ignore[reportPrivateImportUsage]
)

from protocol.errors import ErrorCode
from protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from protocol.messages.delete_topics import DeleteTopicsRequest
from protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from tests.chaos.load import read_all
from tests.clients.scoreboard import Scoreboard
from tests.clients.topics import create_topic
from tests.clients.workers import PARTITIONS, Worker, counted, produce, set_of_group
from tests.cluster.conftest import QUICK_TTL, Cluster, balanced, metric
from tests.cluster.groups import commit, connected, consumer_of, group_coordinated_by
from tests.cluster.proxy import proxied
from tests.cluster.records import fetch
from tests.cluster.records import produce as one_record
from tests.frames.members import create_topic as create_by_frame
from tests.frames.members import fresh
from tests.gateway.data_plane import records_in
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.steps.waiting import until, wait_for
from tests.wire import WireClient

PATIENCE_S = 30.0
NAMES = ("first", "second")
NO_TICK = {"reconcile.periodic.interval.ms": "30000"}
"""The periodic pass is off. So if a node knows a change within PATIENCE_S / 3, the change was announced to it."""


async def partitions_of(client: WireClient, topic: str) -> int:
    """Return the number of partitions according to the node, or 0 for an unknown topic. The node answers from memory if
    it knows the topic.
    """
    answer = await client.send(
        MetadataRequest(topics=(MetadataRequestTopic(name=topic),), allow_auto_topic_creation=False), 9
    )
    return len(answer.topics[0].partitions)


async def grow(client: WireClient, topic: str, count: int) -> None:
    request = CreatePartitionsRequest(topics=(CreatePartitionsTopic(name=topic, count=count, assignments=None),))
    answer = await client.send(request, 3)
    assert answer.results[0].error_code == ErrorCode.NONE, answer


async def seconds_until_known(client: WireClient, topic: str, partitions: int, within_s: float = PATIENCE_S) -> float:
    started = time.monotonic()
    await until(
        lambda: partitions_of(client, topic),
        f"{partitions} partitions are known",
        holds=lambda known: known == partitions,
        seconds=within_s,
    )
    return time.monotonic() - started


def test_a_topic_that_one_node_created_is_usable_through_another_at_once(
    gateway_factory: GatewayFactory, database_url: str
) -> None:
    """Point 18 of the acceptance list: all of a thousand writes succeed. The client does not wait until a topic is
    known, and the node receives no notification.
    """
    settings = {"auto.create.topics.enable": "false", **NO_TICK}
    a = gateway_factory(settings, database_url=database_url)
    with proxied(database_url) as proxy:
        proxy.silence()
        b = gateway_factory(settings, database_url=proxy.url)
        failed, written = write_to_new_topics(a, b, [f"at-once-{number}" for number in range(1000)])
        b.close()
    assert proxy.swallowed > 0
    assert not failed, failed[:3]
    assert written == 1000


def write_to_new_topics(a: GatewayProcess, b: GatewayProcess, names: Sequence[str]) -> tuple[list[KafkaError], int]:
    """Create topics through `a`, fifty at a time, and send `b` a record for each. Return the refusals and the number of
    records that succeeded."""
    failed: list[KafkaError] = []
    written = 0

    def answered(error: KafkaError | None, message: Message) -> None:
        nonlocal written
        if error is not None:
            failed.append(error)
        else:
            written += 1

    admin, looker = AdminClient({"bootstrap.servers": a.bootstrap}), AdminClient({"bootstrap.servers": b.bootstrap})
    producer = Producer(
        {"bootstrap.servers": b.bootstrap, "topic.metadata.propagation.max.ms": 0, "linger.ms": 0, "log_level": 0}
    )
    for first in range(0, len(names), 50):
        made = names[first : first + 50]
        for future in admin.create_topics([NewTopic(name, 1, 1) for name in made]).values():
            future.result(30)
        for name in made[1:]:
            producer.produce(name, b"v", on_delivery=answered)
        assert looker.list_topics(made[0], timeout=30).topics[made[0]].error is None
        producer.produce(made[0], b"v", on_delivery=answered)
        assert producer.flush(30) == 0
    return failed, written


async def test_a_notification_makes_a_change_known_on_other_nodes(cluster: Cluster) -> None:
    nodes = cluster(2, **NO_TICK)
    took: list[float] = []
    async with connected(nodes) as (a, b):
        for number in range(20):
            topic = fresh(f"changed-{number}")
            await create_by_frame(a, topic)
            await seconds_until_known(b, topic, 1)
            await grow(a, topic, 3)
            took.append(await seconds_until_known(b, topic, 3, PATIENCE_S / 3))
            await a.send(DeleteTopicsRequest(topic_names=(topic,)), 5)
            took.append(await seconds_until_known(b, topic, 0, PATIENCE_S / 3))
    print(f"known on the other node: p50 {statistics.median(took) * 1000:.0f} ms, longest {max(took) * 1000:.0f} ms")
    assert statistics.median(took) < 0.2


async def test_a_change_without_notification_is_known_after_an_interval(
    gateway_factory: GatewayFactory, database_url: str
) -> None:
    """Notifications are lost, but the node believes that it still receives them."""
    a = gateway_factory(database_url=database_url)
    with proxied(database_url) as proxy:
        b = gateway_factory({"reconcile.periodic.interval.ms": "1000"}, database_url=proxy.url)
        balanced([a, b])
        async with connected([a, b]) as (on_a, on_b):
            topic = fresh("unheard")
            await create_by_frame(on_a, topic)
            await seconds_until_known(on_b, topic, 1)
            proxy.silence()
            took: list[float] = []
            for count in (2, 3, 4):
                before = metric(b, 'sluice_reconcile_passes_total{trigger="notified"}')
                await grow(on_a, topic, count)
                took.append(await seconds_until_known(on_b, topic, count))
                assert metric(b, 'sluice_reconcile_passes_total{trigger="notified"}') == before
            # A request that names a new topic waits until the node has queried Postgres for the topic.
            proxy.delay(0.2)
            late = fresh("late")
            await create_by_frame(on_a, late)
            started = time.monotonic()
            answers = await asyncio.gather(*(on_b.send_nowait(one_record(late), 9) for _ in range(3)))
            assert [answer.responses[0].partition_responses[0].base_offset for answer in answers] == [0, 1, 2]
            assert time.monotonic() - started > 0.4
            proxy.delay(0.0)
        assert proxy.swallowed >= 3
        print("known without a hint after " + ", ".join(f"{seconds:.2f}" for seconds in took) + " s")
        assert max(took) < 1.0 + 1.5  # One interval, one pass, and time for other work on the machine.
        b.close()


async def test_no_change_is_missed_while_a_listening_session_is_replaced(cluster: Cluster, database_url: str) -> None:
    """Point 39 of the acceptance list: while no session listens, changes are committed. The node looks for them as soon
    as a session listens again."""
    nodes = cluster(2, **NO_TICK)
    postgres = await asyncpg.connect(database_url)
    try:
        async with connected(nodes) as (a, b):
            topic = fresh("missed")
            await create_by_frame(a, topic)
            await seconds_until_known(b, topic, 1)
            for count in range(2, 7):
                ended = await postgres.fetchval(
                    "select count(pg_terminate_backend(pid, 5000)) from pg_stat_activity "
                    "where datname = current_database() and application_name = 'sluice listener'"
                )
                await grow(a, topic, count)
                assert ended >= 1
                await seconds_until_known(b, topic, count, PATIENCE_S / 3)
    finally:
        await postgres.close()


async def test_a_node_that_starts_late_serves_every_topic_at_its_first_request(cluster: Cluster) -> None:
    """Point 40 of the acceptance list."""
    (early,) = cluster(1)
    names = [fresh("early") for _ in range(60)]
    async with connected([early]) as (client,):
        for name in names:
            await create_by_frame(client, name, 3)
            await client.send(one_record(name), 9)
    (late,) = cluster(1)
    late.restart()  # The first request must not have waited until the shards were shared.
    async with connected([late]) as (client,):
        waiting = [
            *(
                client.send_nowait(
                    MetadataRequest(topics=(MetadataRequestTopic(name=name),), allow_auto_topic_creation=False), 9
                )
                for name in names
            ),
            *(client.send_nowait(fetch(name, 0), 11) for name in names),
            *(client.send_nowait(one_record(name), 9) for name in names),
        ]
        answers = await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)
    described, fetched, produced = answers[:60], answers[60:120], answers[120:]
    assert [len(answer.topics[0].partitions) for answer in described] == [3] * 60
    assert all(answer.responses[0].partitions[0].high_watermark >= 1 for answer in fetched)
    assert [answer.responses[0].partition_responses[0].base_offset for answer in produced] == [1] * 60


async def test_a_topic_that_is_created_again_holds_no_record_of_its_predecessor(cluster: Cluster) -> None:
    """Point 41 of the acceptance list: producers on both nodes never stop while the topic is deleted and created
    again."""
    nodes = cluster(2)
    topic = fresh("again")
    sent_s: dict[bytes, float] = {}
    taken: dict[bytes, tuple[int, float]] = {}
    stop, enough, goal = asyncio.Event(), asyncio.Event(), 0

    async def written(more: int) -> None:
        nonlocal goal
        goal = len(taken) + more
        enough.clear()
        async with asyncio.timeout(PATIENCE_S):
            await enough.wait()

    async def write(node: GatewayProcess, who: str) -> None:
        async with await WireClient.connect(node.bootstrap) as client:
            number = 0
            while not stop.is_set():
                value = f"{who}{number}".encode()
                number += 1
                sent_s[value] = time.monotonic()
                answer = (await client.send(one_record(topic, value), 9)).responses[0].partition_responses[0]
                assert answer.error_code in (ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), answer
                if answer.error_code == ErrorCode.NONE:
                    taken[value] = answer.base_offset, time.monotonic()
                if len(taken) >= goal:
                    enough.set()

    async with connected(nodes) as clients:
        old = await create_by_frame(clients[0], topic)
        writers = [asyncio.create_task(write(node, name)) for node, name in zip(nodes, "ab", strict=True)]
        for number in range(12):
            await written(40)
            deleted_s = time.monotonic()
            await clients[number % 2].send(DeleteTopicsRequest(topic_names=(topic,)), 5)
            new = await create_by_frame(clients[(number + number // 2) % 2], topic)
            made_s = time.monotonic()
            for client in clients:
                await refused(client, old)
            old = new
        await written(40)
        stop.set()
        await asyncio.gather(*writers)
    for node in nodes:
        records = await asyncio.to_thread(read_all, node.bootstrap, topic, 1)
        found = {value: offset for (_, offset), value in records.items()}
        assert len(found) == len(records), "a record is there twice"
        former = [value for value in found if value in taken and taken[value][1] < deleted_s]
        assert not former, "records of an earlier topic are there again"
        lost = [v for v, (offset, _) in taken.items() if sent_s[v] > made_s and found.get(v) != offset]
        assert not lost, "acknowledged records are not at their offset"
        assert len(found) >= 40


async def refused(client: WireClient, topic_id: uuid.UUID) -> None:
    """Check that the node refuses a fetch by the id of a deleted topic whose name is in use again."""
    partition = FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=2**20)
    request = FetchRequest(
        max_wait_ms=100,
        min_bytes=1,
        max_bytes=2**20,
        topics=(FetchTopic(topic_id=topic_id, partitions=(partition,)),),
    )
    answer = await client.send(request, 13)
    assert answer.responses[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID


def values_of(answer: FetchResponse) -> list[bytes | None]:
    return [record.value for record in records_in(answer.responses[0].partitions[0])]


async def test_a_node_without_notifications_serves_no_record_of_a_topic_that_was_created_again(
    gateway_factory: GatewayFactory, database_url: str
) -> None:
    """The creation waits until the other node has learnt of the deletion by itself."""
    a = gateway_factory(database_url=database_url)
    with proxied(database_url) as proxy:
        b = gateway_factory({"reconcile.periodic.interval.ms": "1000"}, database_url=proxy.url)
        balanced([a, b])
        proxy.silence()
        async with connected([a, b]) as (on_a, on_b):
            topic = fresh("again")
            for number in range(3):
                old = await create_by_frame(on_a, topic)
                for _ in range(5):
                    await on_b.send(one_record(topic, b"old"), 9)
                await on_a.send(DeleteTopicsRequest(topic_names=(topic,)), 5)
                await create_by_frame(on_a, topic)
                await refused(on_b, old)
                await on_a.send(one_record(topic, f"new {number}".encode()), 9)
                assert values_of(await on_b.send(fetch(topic, 0), 11)) == [f"new {number}".encode()]
                await on_a.send(DeleteTopicsRequest(topic_names=(topic,)), 5)
        assert proxy.swallowed
        b.close()


async def test_a_node_without_postgres_serves_no_record_of_a_topic_that_was_created_again(
    gateway_factory: GatewayFactory, database_url: str
) -> None:
    """The creation waits until the registration of the node has expired. From then on the node asks Postgres before it
    serves records from memory."""
    ttl = {"SLUICE_NODE_TTL_MS": "3000"}
    a = gateway_factory(database_url=database_url, environment=ttl)
    with proxied(database_url) as proxy:
        b = gateway_factory(database_url=proxy.url, environment=ttl)
        balanced([a, b])
        async with connected([a, b]) as (on_a, on_b):
            topic = fresh("again")
            old = await create_by_frame(on_a, topic)
            for _ in range(5):
                await on_b.send(one_record(topic, b"old"), 9)
            proxy.drop()
            await on_a.send(DeleteTopicsRequest(topic_names=(topic,)), 5)
            await create_by_frame(on_a, topic)
            await on_a.send(one_record(topic, b"new"), 9)
            waiting = on_b.send_nowait(fetch(topic, 0), 11)
            proxy.heal()
            assert values_of(await waiting) in ([], [b"new"])
            await refused(on_b, old)
            assert values_of(await on_b.send(fetch(topic, 0), 11)) == [b"new"]
        b.close()


@pytest.mark.parametrize("kind", ["eager", "cooperative", "consumer"])
def test_partitions_that_another_node_adds_are_assigned(cluster: Cluster, kind: str) -> None:
    """Point 48 of the acceptance list."""
    a, b = nodes = cluster(2)
    topic, group = create_topic(a.bootstrap, PARTITIONS), group_coordinated_by(a, nodes)
    board = Scoreboard()
    workers = [Worker(kind, name, board, a.bootstrap, topic, group) for name in NAMES]
    try:
        for worker in workers:
            worker.thread.start()
        board.wait_settled(set(NAMES), PARTITIONS)
        admin = AdminClient({"bootstrap.servers": b.bootstrap})
        admin.create_partitions([NewPartitions(topic, 2 * PARTITIONS)])[topic].result(30)
        board.wait_settled(set(NAMES), 2 * PARTITIONS)
    finally:
        for worker in workers:
            worker.thread.stop()
    assert not board.failures


@pytest.mark.parametrize("kind", ["eager", "cooperative", "consumer"])
def test_work_is_drained_if_another_node_served_the_records(cluster: Cluster, kind: str) -> None:
    """Point 37 of the acceptance list: another node than the coordinator has served the records whose commits the
    coordinator waits for.
    """
    a, b = nodes = cluster(2)
    group, topic = group_coordinated_by(a, nodes), topic_led_by(b)
    board = Scoreboard()
    set_of_group(a.bootstrap, group, group_handoff_mode="drain")
    bootstrap = f"{a.bootstrap},{b.bootstrap}"
    produce(bootstrap, topic)
    first = Worker(kind, "first", board, bootstrap, topic, group)
    second = Worker(kind, "second", board, bootstrap, topic, group)
    try:
        first.thread.start()
        board.wait_for(lambda: len(board.deliveries) == 40, "all records")
        second.thread.start()
        wait_for(lambda: counted(a, "group_handoffs_pending") == {"": 2.0}, "no partition is waited for")
        assert all(each.member == "first" for each in board.deliveries)
        first.finish()
        board.wait_settled(set(NAMES), PARTITIONS)
        produce(bootstrap, topic)
        board.wait_for(lambda: len(board.deliveries) >= 80, "the new records")
        first.finish()
        second.finish()
    finally:
        second.thread.stop()
        first.thread.stop()
    assert not board.failures
    given = {name: {(e.partition, e.offset) for e in board.deliveries if e.member == name} for name in NAMES}
    assert not given["first"] & given["second"]
    assert counted(a, "group_handoffs_forced_total") == {"": 0.0}


@pytest.mark.parametrize(
    ("kind", "end"), [("cooperative", "commits"), ("consumer", "commits"), ("eager", "says nothing")]
)
def test_work_is_drained_though_the_node_that_served_it_is_lost(cluster: Cluster, kind: str, end: str) -> None:
    """Point 37 of the acceptance list: a member that gains a partition waits for the old owner's commit. It waits no
    longer than that or the handoff's timeout."""
    a, b = nodes = cluster(2, environment=QUICK_TTL)
    group, topic = group_coordinated_by(a, nodes), topic_led_by(b)
    board = Scoreboard()
    set_of_group(
        a.bootstrap, group, group_handoff_mode="drain", group_handoff_timeout_ms="60000" if end == "commits" else "8000"
    )
    bootstrap = f"{a.bootstrap},{b.bootstrap}"
    produce(bootstrap, topic)
    first = Worker(kind, "first", board, bootstrap, topic, group)
    second = Worker(kind, "second", board, bootstrap, topic, group)
    try:
        first.thread.start()
        board.wait_for(lambda: len(board.deliveries) == 40, "all records")
        b.kill()
        second.thread.start()
        wait_for(lambda: counted(a, "group_handoffs_pending") == {"": 2.0}, "no partition is waited for")
        assert all(each.member == "first" for each in board.deliveries)
        if end == "commits":
            # Another node may have served records, even if that node is not alive any more.
            wait_for(lambda: metric(a, "kafka_brokers") == 1, "the other node is alive")
            assert counted(a, "group_handoffs_pending") == {"": 2.0}
            first.finish()
        board.wait_settled(set(NAMES), PARTITIONS)
        produce(a.bootstrap, topic)
        board.wait_for(lambda: {e.member for e in board.deliveries[40:]} == set(NAMES), "the new records")
        if end == "commits":
            board.wait_for(lambda: len(board.deliveries) >= 80, "all new records")
            first.finish()
            second.finish()
    finally:
        second.thread.stop()
        first.thread.stop()
    assert not board.failures
    given = {name: {(e.partition, e.offset) for e in board.deliveries if e.member == name} for name in NAMES}
    if end == "commits":
        assert not given["first"] & given["second"]
    forced = counted(a, "group_handoffs_forced_total")[""]
    assert forced == 0 if end == "commits" else forced >= 2


def topic_led_by(node: GatewayProcess) -> str:
    """Create a topic whose partitions are all led by the node, because it is their only named replica."""
    admin = AdminClient({"bootstrap.servers": node.bootstrap})
    brokers = admin.list_topics(timeout=30).brokers.values()
    (broker,) = (each.id for each in brokers if f"{each.host}:{each.port}" == node.bootstrap)
    topic = f"led-{uuid.uuid4().hex[:8]}"
    admin.create_topics([NewTopic(topic, PARTITIONS, replica_assignment=[[broker]] * PARTITIONS)])[topic].result(30)
    found = admin.list_topics(topic, timeout=30).topics[topic]
    assert {each.leader for each in found.partitions.values()} == {broker}
    return topic


def test_offsets_of_a_deleted_group_are_gone_on_every_node(cluster: Cluster) -> None:
    """Point 49 of the acceptance list: a group that is recreated with the same name has no offsets."""
    a, b = nodes = cluster(2)
    topic = create_topic(a.bootstrap, 2)
    places = [TopicPartition(topic, index) for index in range(2)]
    admin = AdminClient({"bootstrap.servers": b.bootstrap})
    for owner in nodes:
        group = group_coordinated_by(owner, nodes)

        def committed(node: GatewayProcess, group: str = group) -> list[int]:
            with consumer_of(node, group) as consumer:
                return [each.offset for each in consumer.committed(places, 30)]

        commit(a, group, [TopicPartition(topic, 0, 5), TopicPartition(topic, 1, 6)])
        assert committed(a) == committed(b) == [5, 6]
        admin.delete_consumer_groups([group])[group].result(30)
        assert committed(a) == committed(b) == [-1001, -1001]
        commit(b, group, [TopicPartition(topic, 1, 1)])
        assert committed(a) == committed(b) == [-1001, 1]


async def test_queries_of_an_idle_cluster_do_not_grow_with_what_it_holds(cluster: Cluster, database_url: str) -> None:
    """Point 44 of the acceptance list: no query per partition, per group or per parked fetch."""
    nodes = cluster(2)
    postgres = await asyncpg.connect(database_url)

    async def transactions(seconds: float = 8.0) -> float:
        """Return the transactions per second of all nodes together."""
        counted = "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"
        before = await postgres.fetchval(counted)
        await asyncio.sleep(seconds)
        return (await postgres.fetchval(counted) - before) / seconds

    try:
        async with connected([node for node in nodes for _ in range(20)]) as clients:
            await asyncio.sleep(8.0)  # A node that has just started sends more queries.
            little = await transactions()
            topics = [fresh("idle") for _ in range(10)]
            for topic in topics:
                await create_by_frame(clients[0], topic, 50)
                await clients[0].send(one_record(topic), 9)
            for number in range(30):
                await asyncio.to_thread(commit, nodes[0], f"idle-{number}", [TopicPartition(topics[0], 0, 1)])
            waiting = [
                client.send_nowait(fetch(topics[number % 10], 1, max_wait_ms=25_000), 11)
                for number, client in enumerate(clients)
            ]
            await asyncio.sleep(8.0)
            much = await transactions()
            assert not any(each.done() for each in waiting)
    finally:
        await postgres.close()
    print(f"transactions per second of two nodes: {little:.1f} when empty, {much:.1f} with all that")
    # If each of the 30 groups needed one query at each renewal, there would be 24 queries a second.
    assert much < little + 15.0
