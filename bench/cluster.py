"""Measure several nodes on one Postgres: how fast a node takes groups over, how late other nodes are, what an idle node
costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import statistics
import time
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from bench import frames
from gateway.cluster.leases import SHARDS
from protocol.errors import ErrorCode
from protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from storage.embedded import EmbeddedPostgres
from tests.cluster.coordinators import coordinator_of, goes_on
from tests.cluster.records import delays
from tests.frames.members import Member, create_topic, fresh, settle
from tests.gateway_process import GatewayProcess, find_coordinator
from tests.postgres import LoopThread, short_directory
from tests.wire import WireClient

Line = tuple[str, str, str, bool]

LEASE_S = 5.0
KNOWN_S = 6.0
"""Seconds after which all nodes know a node that has just started."""
ROUNDS = 100
TOPICS, PARTITIONS = 200, 50
IDLE_S = 20.0
HEARTBEAT_GROUPS = 20


@contextlib.contextmanager
def nodes_on_one_postgres(count: int = 4) -> Generator[tuple[list[GatewayProcess], int]]:
    """Prepare nodes on a fresh Postgres, without starting them. Yield the nodes and the process id
    of the postmaster.
    """
    loop = LoopThread()
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        server = EmbeddedPostgres(stack.enter_context(short_directory()) / "server")
        url = loop.run(server.start())
        stack.callback(lambda: loop.run(server.stop()))
        nodes: list[GatewayProcess] = []
        for _ in range(count):
            directory = stack.enter_context(short_directory())
            node = GatewayProcess(
                directory, database_url=url, settings={"group.initial.rebalance.delay.ms": "0"}, environment={}
            )
            stack.callback(node.close)
            nodes.append(node)
        assert server.pid is not None
        yield nodes, server.pid


def start(nodes: Sequence[GatewayProcess]) -> None:
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(GatewayProcess.start, nodes))
    find_coordinator(nodes[0].bootstrap)


def sample(node: GatewayProcess, name: str) -> float:
    with urllib.request.urlopen(f"{node.metrics_url}/metrics", timeout=10) as answer:
        found = re.search(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def balance(nodes: Sequence[GatewayProcess]) -> None:
    deadline = time.monotonic() + 60
    while True:
        held = [sample(node, "sluice_coordinator_leases") for node in nodes]
        if sum(held) == SHARDS and max(held) - min(held) <= 1:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the nodes have not divided the shards among them: {held}")
        time.sleep(0.1)


async def takeover(nodes: Sequence[GatewayProcess], end: signal.Signals) -> float:
    """Return the seconds from the end of a group's coordinator until another node answers a member in the same
    generation.
    """
    group = fresh("group")
    owner = await coordinator_of(group, nodes)
    if owner is None:
        raise RuntimeError("no node knows the coordinator")
    async with (
        await WireClient.connect(owner.bootstrap) as first,
        await WireClient.connect(owner.bootstrap) as second,
    ):
        one, two = Member(first, group, session_timeout_ms=30_000), Member(second, group, session_timeout_ms=30_000)
        await settle(one, two)
        psutil.Process(owner.pid).send_signal(end)
        took_s = await goes_on(one, [node for node in nodes if node is not owner], 30.0)
    await asyncio.to_thread(owner.kill)
    await asyncio.to_thread(owner.start)
    return took_s


async def visibility_ms(nodes: Sequence[GatewayProcess]) -> list[float]:
    """Return, for each round, the time from the CreateTopics answer of one node until every other
    node knows the topic.
    """
    clients = [await WireClient.connect(node.bootstrap) for node in nodes]
    found: list[float] = []
    try:
        for number in range(ROUNDS):
            name = fresh(f"seen-{number}")
            topic = CreatableTopic(name=name, num_partitions=3, replication_factor=1)
            await clients[0].send(CreateTopicsRequest(topics=(topic,)), 5)
            created = time.perf_counter()
            for client in clients[1:]:
                while True:
                    answer = await client.send(MetadataRequest(topics=(MetadataRequestTopic(name=name),)), 9)
                    if answer.topics[0].error_code == ErrorCode.NONE:
                        break
            found.append((time.perf_counter() - created) * 1000)
    finally:
        for client in clients:
            await client.close()
    return found


async def behind_ms(writer: GatewayProcess, reader: GatewayProcess) -> tuple[float, float]:
    """Return the p50 from an acknowledgement to a waiting fetch's answer, on the writer's node and
    on the other node.
    """
    async with (
        await WireClient.connect(writer.bootstrap) as on_writer,
        await WireClient.connect(reader.bootstrap) as on_reader,
    ):
        topic = fresh("t")
        await create_topic(on_writer, topic)
        await asyncio.sleep(KNOWN_S)
        found: list[float] = []
        offset = 0
        for client in (on_writer, on_reader):
            times = await delays(on_writer, client, topic, offset)
            offset += len(times)
            found.append(statistics.median(times) * 1000)
    return found[0], found[1]


async def fill(node: GatewayProcess) -> None:
    async with await WireClient.connect(node.bootstrap) as client:
        for number in range(TOPICS):
            topic = CreatableTopic(name=f"many-{number}", num_partitions=PARTITIONS, replication_factor=1)
            answer = await client.send(CreateTopicsRequest(topics=(topic,), timeout_ms=60_000), 5)
            if answer.topics[0].error_code:
                raise RuntimeError(f"CreateTopics answered {answer.topics[0].error_code}")


async def partitions_known(node: GatewayProcess) -> int:
    async with await WireClient.connect(node.bootstrap) as client:
        answer = await client.send(MetadataRequest(topics=None), 9)
        return sum(len(topic.partitions) for topic in answer.topics)


async def heartbeats(nodes: Sequence[GatewayProcess]) -> tuple[float, float]:
    """Return the heartbeats per second of all nodes together, and the CPU microseconds that each heartbeat costs its
    node.
    """
    groups: dict[int, list[str]] = {id(node): [] for node in nodes}
    while any(len(found) < HEARTBEAT_GROUPS for found in groups.values()):
        name = fresh("beat")
        owner = await coordinator_of(name, nodes)
        if owner is not None and len(groups[id(owner)]) < HEARTBEAT_GROUPS:
            groups[id(owner)].append(name)

    def busy_s() -> float:
        times = [psutil.Process(node.pid).cpu_times() for node in nodes]
        return sum(each.user + each.system for each in times)

    before = busy_s()
    rates = await asyncio.gather(
        *(
            frames.heartbeats(
                *_address(node),
                connections=HEARTBEAT_GROUPS,
                window=10,
                seconds=6,
                groups=groups[id(node)],
            )
            for node in nodes
        )
    )
    requests = sum(rate.requests for rate in rates)
    return sum(rate.per_second for rate in rates), (busy_s() - before) / requests * 1e6


def _address(node: GatewayProcess) -> tuple[str, int]:
    host, _, port = node.bootstrap.rpartition(":")
    return host, int(port)


def measure() -> Iterator[Line]:
    with nodes_on_one_postgres() as (nodes, _):
        start(nodes[:1])
        lone_rate, lone_us = asyncio.run(heartbeats(nodes[:1]))
        start(nodes[1:])
        balance(nodes)
        rate, us = asyncio.run(heartbeats(nodes))
        yield (
            "heartbeats on four nodes",
            "three times one node's, or the same CPU each",
            f"{rate:,.0f}/s at {us:.0f} µs each; one node {lone_rate:,.0f}/s at {lone_us:.0f} µs",
            rate >= 3 * lone_rate or us <= 1.15 * lone_us,
        )
        nodes[3].stop()
        nodes = nodes[:3]
        balance(nodes)
        for end, limit_s in ((signal.SIGKILL, LEASE_S + 1.0), (signal.SIGTERM, 0.2)):
            took: list[float] = []
            for _ in range(3):
                took.append(asyncio.run(takeover(nodes, end)))
                balance(nodes)
            yield (
                f"a group goes on elsewhere after {end.name}, same generation",
                f"≤ {limit_s * 1000:,.0f} ms",
                f"{', '.join(f'{value * 1000:,.0f}' for value in took)} ms",
                max(took) <= limit_s,
            )
        local_ms, remote_ms = asyncio.run(behind_ms(nodes[0], nodes[1]))
        yield (
            "a reader on another node than the writer, p50 behind the acknowledgement",
            "≤ 5 ms behind a local one",
            f"{remote_ms:.1f} ms, a local one {local_ms:.1f} ms",
            remote_ms - local_ms <= 5,
        )
        seen = asyncio.run(visibility_ms(nodes))
        p99 = statistics.quantiles(seen, n=100)[98]
        yield (
            "a new topic is known on all of three nodes",
            "p99 ≤ 100 ms",
            f"p50 {statistics.median(seen):.1f} ms, p99 {p99:.1f} ms of {len(seen)}",
            p99 <= 100,
        )
        asyncio.run(fill(nodes[0]))
        for node in nodes:
            node.stop()
        began = time.perf_counter()
        start(nodes)
        known = [asyncio.run(partitions_known(node)) for node in nodes]
        cold_s = time.perf_counter() - began
        if min(known) < TOPICS * PARTITIONS:
            raise RuntimeError(f"the nodes know {known} partitions")
        yield (
            f"{min(known):,} partitions on three nodes, from start to the last one's whole Metadata",
            "≤ 5 s",
            f"{cold_s:.1f} s",
            cold_s <= 5,
        )
        more = asyncio.run(visibility_ms(nodes))
        yield (
            "… one topic more, until all know it",
            "≤ 20 ms",
            f"p50 {statistics.median(more):.1f} ms, p99 {statistics.quantiles(more, n=100)[98]:.1f} ms",
            statistics.median(more) <= 20,
        )
        balance(nodes)
        time.sleep(KNOWN_S)
        names = ("sluice_reconcile_pass_seconds_sum", "sluice_reconcile_pass_seconds_count")
        before = [[sample(node, name) for name in names] for node in nodes]
        time.sleep(IDLE_S)
        after = [[sample(node, name) for name in names] for node in nodes]
        costs = [
            (spent[0] - had[0]) / max(1.0, spent[1] - had[1]) * 1000 for had, spent in zip(before, after, strict=True)
        ]
        yield (
            "an idle pass of the reconciler, with these partitions",
            "≤ 1 ms",
            f"{max(costs):.2f} ms mean of the slowest node, {after[0][1] - before[0][1]:.0f} passes in {IDLE_S:.0f} s",
            max(costs) <= 1,
        )
