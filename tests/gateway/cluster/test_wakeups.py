"""Announcements by which a node's append wakes fetches on the other node, on one Postgres: also if they are lost, and
what they cost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from gateway.cluster import wakeups as module
from gateway.cluster.wakeups import Wakeups
from gateway.log.append_listener import NO_LISTENER
from storage import notify
from storage.errors import StorageError, StorageUnavailable
from storage.nodes import NodeStore
from storage.types import NewBatch, PartitionKey
from tests.gateway.data_plane import DataPlane, at, batch_of, data_plane, offsets_in
from tests.steps.waiting import turns, until

LONG_MS = 30_000
DEADLINE_S = 20.0


class Node:
    """One node's log and its wake-ups, listening for announcements."""

    def __init__(self, plane: DataPlane) -> None:
        self.plane = plane
        self.store = NodeStore(plane.database)
        self.hearing = asyncio.Event()
        self.queries: list[int] = []

    async def run(self, stack: contextlib.AsyncExitStack) -> None:
        plane = self.plane
        self.wakeups = Wakeups(plane.tail, plane.membership, self._announce, self._states)
        plane.membership.connect(self.wakeups)
        plane.appends.listener = self.wakeups
        self.listener = notify.Listener(plane.database, {notify.APPENDS: lambda payload: self.hear(payload)})
        self.hear = self.wakeups.heard
        for run in (self._listen, self.wakeups.announce_all, self.wakeups.look):
            task = asyncio.create_task(_again(run))
            stack.push_async_callback(_cancelled, task)
        async with asyncio.timeout(DEADLINE_S):
            await self.hearing.wait()
        self.wakeups.registered()

    async def _announce(self, payloads: Sequence[str]) -> None:
        await NodeStore(self.plane.database).announce(payloads)

    async def _states(self, keys):
        keys = list(keys)
        self.queries.append(len(keys))
        return await self.plane.log.states(keys)

    async def _listen(self) -> None:
        def begun() -> None:
            self.wakeups.hearing()
            self.hearing.set()

        await self.listener.listen(begun, self.wakeups.deaf)


async def _again(run: Callable[[], object]) -> None:
    while True:
        with contextlib.suppress(StorageError):
            await run()  # type: ignore[misc]
        await asyncio.sleep(0)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def two_nodes(url: str) -> AsyncGenerator[tuple[Node, Node]]:
    async with data_plane(url, name="a") as a, data_plane(url, name="b") as b, contextlib.AsyncExitStack() as stack:
        await a.membership.renew()
        nodes = Node(a), Node(b)
        for node in nodes:
            await node.run(stack)
        yield nodes


@pytest.fixture
async def nodes(database_url: str) -> AsyncIterator[tuple[Node, Node]]:
    async with two_nodes(database_url) as nodes:
        yield nodes


async def parked_fetch(node: Node, topic, offset: int):
    """Start a long poll on the node, and return its task once it waits."""
    task = asyncio.create_task(node.plane.fetch([(topic, at(offset))], max_wait_ms=LONG_MS))
    async with asyncio.timeout(DEADLINE_S):
        while node.plane.tail.parked_count == 0:
            assert not task.done(), task
            await asyncio.sleep(0.001)
    return task


async def parked_fetch_of_a_settled(node: Node, topic, offset: int):
    """Do the same, and wait until the node has made the look that is due after its start. A later look needs a
    reason.
    """
    task = await parked_fetch(node, topic, offset)
    await until(lambda: node.queries)
    return task


async def test_parked_fetch_is_woken_by_an_append_on_another_node(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    topic = await a.plane.create_topic("t")
    await b.plane.catalog.resolve("t")
    delays: list[float] = []
    loop = asyncio.get_running_loop()
    for offset in range(20):
        task = await parked_fetch(b, topic, offset)
        await a.plane.fill(topic, [100])
        acknowledged_s = loop.time()
        async with asyncio.timeout(DEADLINE_S):
            response = await task
        delays.append(loop.time() - acknowledged_s)
        assert response.responses[0].partitions[0].high_watermark == offset + 1
    assert sorted(delays)[len(delays) // 2] < 0.1, delays


async def test_idle_fetches_do_not_query_postgres(nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.log.tail.DOUBTFUL_AGE_S", 0.0)
    a, b = nodes
    topic = await a.plane.create_topic("t")
    await a.plane.fill(topic, [100])
    await b.plane.catalog.resolve("t")
    await b.plane.fetch([(topic, at(1))], max_wait_ms=0)
    reads = 0
    read = b.plane.log.read

    async def counted(*args, **kwargs):
        nonlocal reads
        reads += 1
        return await read(*args, **kwargs)

    monkeypatch.setattr(b.plane.log, "read", counted)
    b.queries.clear()
    for _ in range(20):
        await asyncio.gather(*(b.plane.fetch([(topic, at(1))], max_wait_ms=10) for _ in range(5)))
    assert (reads, b.queries) == (0, [])
    await a.plane.fill(topic, [100])
    async with asyncio.timeout(DEADLINE_S):
        while not (await b.plane.fetch([(topic, at(1))], max_wait_ms=100)).responses[0].partitions[0].records:
            pass
    assert reads >= 1


async def test_many_appends_at_once_are_announced_together(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    topic = await a.plane.create_topic("t", 300)
    keys = [partition.partition_key for partition in topic.partitions]
    for round_ in range(1, 21):
        for key in keys:
            a.wakeups.appended(key, round_)
    await until(lambda: 0 < a.wakeups.counts["sent"] == b.wakeups.counts["heard"])
    assert a.wakeups.counts["sent"] <= 3
    assert a.wakeups.counts["merged"] == 300 * 19


async def test_a_lone_node_announces_nothing(database_url: str) -> None:
    async with data_plane(database_url) as plane, contextlib.AsyncExitStack() as stack:
        node = Node(plane)
        await node.run(stack)
        topic = await plane.create_topic("t")
        await plane.fill(topic, [100, 100])
        await asyncio.sleep(3 * module.ANNOUNCE_INTERVAL_S)
        assert node.wakeups.counts["sent"] == 0


async def test_commit_of_unknown_outcome_becomes_visible_by_itself(database_url: str) -> None:
    """The records became durable, but their node did not learn this. Readers must receive them without another append,
    and also if there is no other node.
    """
    async with data_plane(database_url) as plane, contextlib.AsyncExitStack() as stack:
        node = Node(plane)
        await node.run(stack)
        topic = await plane.create_topic("t")
        await plane.fill(topic, [100])
        await until(lambda: not plane.tail.doubtful(asyncio.get_running_loop().time()))
        task = await parked_fetch(node, topic, 1)
        looks = len(node.queries)
        await asyncio.sleep(2 * module.LOOK_INTERVAL_S)
        assert len(node.queries) <= looks + 1, "while nothing is in doubt nobody looks"
        await plane.log.append([NewBatch(topic.partitions[0].partition_key, bytearray(batch_of(b"1")), 1, 1_000)])
        plane.tail.doubt(asyncio.get_running_loop().time())
        plane.appends.in_doubt()
        async with asyncio.timeout(DEADLINE_S):
            assert offsets_in((await task).responses[0].partitions[0]) == [1]


async def test_lost_announcements_are_detected_by_their_count(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    topic = await a.plane.create_topic("t")
    await b.plane.catalog.resolve("t")
    await b.plane.membership.renew()
    task = await parked_fetch(b, topic, 0)
    late: list[str] = []

    def hear(payload: str) -> None:
        late.append(payload)

    b.hear = hear
    await a.plane.fill(topic, [100])
    await until(lambda: a.wakeups.counts["sent"] > 0)
    await a.plane.membership.renew()
    await b.plane.membership.renew()
    assert not task.done(), "what has just been sent may still be on its way"
    await b.plane.membership.renew()
    async with asyncio.timeout(DEADLINE_S):
        response = await task
    assert response.responses[0].partitions[0].high_watermark == 1
    assert b.wakeups.counts["missed"] == 1
    assert late
    for payload in late:
        b.wakeups.heard(payload)
    assert (b.wakeups.counts["late"], b.wakeups.counts["missed"]) == (len(late), 1)


async def test_announcement_that_failed_makes_the_other_node_look(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = nodes
    topic = await a.plane.create_topic("t")
    await b.plane.catalog.resolve("t")
    task = await parked_fetch_of_a_settled(b, topic, 0)
    lost: list[Sequence[str]] = []
    announce = NodeStore(a.plane.database).announce

    async def lose_the_first(payloads: Sequence[str]) -> None:
        if not lost:
            lost.append(payloads)
            raise StorageUnavailable("lost")
        await announce(payloads)

    monkeypatch.setattr(a.wakeups, "_announce", lose_the_first)
    await a.plane.fill(topic, [100])
    async with asyncio.timeout(DEADLINE_S):
        assert offsets_in((await task).responses[0].partitions[0]) == [0]
    assert lost


async def test_announced_end_is_the_highest_also_if_a_lower_one_comes_last(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    heard: list[str] = []

    def hear(payload: str) -> None:
        heard.append(payload)

    b.hear = hear
    a.wakeups.appended(PartitionKey(1), 5)
    a.wakeups.appended(PartitionKey(1), 4)
    await until(lambda: heard)
    assert [payload.rpartition(":")[2] for payload in heard] == ["1=5"]


async def test_late_announcement_hides_no_gap_and_makes_none(database_url: str) -> None:
    async with data_plane(database_url) as plane:
        wakeups = Wakeups(plane.tail, plane.membership, NodeStore(plane.database).announce, plane.log.states)
        for number in (1, 3, 2, 4, 6):
            wakeups.heard(f"99.1:{number}:1={number}")
        assert (wakeups.counts["late"], wakeups.counts["missed"]) == (1, 2)


async def test_a_forged_number_hides_no_announcement(nodes: tuple[Node, Node]) -> None:
    """Every role of Postgres may notify the channel in the name of a node."""
    a, b = nodes
    topic = await a.plane.create_topic("t")
    await b.plane.catalog.resolve("t")
    task = await parked_fetch_of_a_settled(b, topic, 0)
    looks = len(b.queries)
    sender = a.plane.membership.self_node
    b.wakeups.heard(f"{sender.node_id}.{sender.incarnation}:1:{topic.partitions[0].partition_key}=0")
    b.wakeups.heard(f"{sender.node_id}.{sender.incarnation}:{2**60}:{topic.partitions[0].partition_key}=0")
    await until(lambda: len(b.queries) > looks)
    await a.plane.fill(topic, [100])
    async with asyncio.timeout(DEADLINE_S):
        assert offsets_in((await task).responses[0].partitions[0]) == [0]
    assert b.wakeups.counts["late"] == 1


async def test_ends_are_in_doubt_once_a_node_is_gone(database_url: str) -> None:
    async with data_plane(database_url) as plane:
        clock = asyncio.get_running_loop().time
        wakeups = Wakeups(plane.tail, plane.membership, NodeStore(plane.database).announce, plane.log.states)
        wakeups.hearing()
        wakeups.nodes_seen([], gone=False)
        assert not plane.tail.doubtful(clock())
        wakeups.nodes_seen([], gone=True)
        assert plane.tail.doubtful(clock())


async def test_a_killed_listener_connection_loses_nothing(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    topic = await a.plane.create_topic("t")
    await b.plane.catalog.resolve("t")
    for offset in range(3):
        task = await parked_fetch(b, topic, offset)
        await a.plane.database.control.fetch(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and application_name = 'sluice listener'"
        )
        await a.plane.fill(topic, [100])
        async with asyncio.timeout(DEADLINE_S):
            assert (await task).responses[0].partitions[0].high_watermark == offset + 1


async def test_unannounced_appends_of_an_ended_node_are_found(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = nodes
    topic = await a.plane.create_topic("t")
    await b.plane.catalog.resolve("t")
    a.plane.appends.listener = NO_LISTENER
    task = await parked_fetch_of_a_settled(b, topic, 0)
    await a.plane.fill(topic, [100])
    await a.plane.membership.withdraw()
    await b.plane.membership.renew()
    async with asyncio.timeout(DEADLINE_S):
        assert (await task).responses[0].partitions[0].high_watermark == 1


@pytest.mark.parametrize("payload", ["", "x", "1.1:1", "1.1:x:1=1", "1.1:1:1", "1.1:1:1=x", "1:1:1=1", "1.1:1:a=1,"])
async def test_invalid_payload_is_ignored(nodes: tuple[Node, Node], payload: str) -> None:
    _, b = nodes
    before = dict(b.wakeups.counts)
    b.wakeups.heard(payload)
    assert b.wakeups.counts == before
    assert b.plane.tail.known(PartitionKey(1), 0.0) is None


async def test_look_learns_nothing_of_a_partition_that_is_no_longer_watched(database_url: str) -> None:
    async with data_plane(database_url) as plane:
        topic = await plane.create_topic("t")
        key = topic.partitions[0].partition_key
        watch = plane.tail.watch([key])
        read = asyncio.Event()

        async def read_then_close(keys):
            states = await plane.log.states(list(keys))
            watch.close()
            plane.tail.heard(key, 1, asyncio.get_running_loop().time())
            read.set()
            return states

        wakeups = Wakeups(plane.tail, plane.membership, NodeStore(plane.database).announce, read_then_close)
        looking = asyncio.create_task(wakeups.look())
        await read.wait()
        await turns(3)
        assert plane.tail.known(key, asyncio.get_running_loop().time()) is None
        await _cancelled(looking)
