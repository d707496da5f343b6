"""Postgres, the network or a clock fails a node: stock clients continue, and no acknowledged record is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import asyncpg
import pytest

from protocol.errors import ErrorCode
from protocol.messages.heartbeat import HeartbeatRequest
from storage.embedded import EmbeddedPostgres
from tests.chaos.load import Load, assert_nothing_lost
from tests.clients.topics import create_topic
from tests.cluster.conftest import QUICK_TTL, SHARDS, TTL_S, Cluster, balanced, metric
from tests.cluster.coordinators import coordinator_of, goes_on, offset_of
from tests.cluster.proxy import PostgresProxy, proxied
from tests.cluster.readers import Readers
from tests.frames.members import Member, fresh, settle
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.postgres import LoopThread, cluster_directory
from tests.steps.seeds import first_always
from tests.steps.waiting import until, until_blocked
from tests.templates import migrate_at
from tests.wire import WireClient

PARTITIONS = 6
LEASE_S = 5.0
CHURN_S = float(os.environ.get("SLUICE_TEST_CHURN_SECONDS", "40"))
FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


def bootstrap_of(nodes: Sequence[GatewayProcess]) -> str:
    return ",".join(node.bootstrap for node in nodes)


@contextlib.contextmanager
def under_load(
    nodes: Sequence[GatewayProcess], *, members: int = 3, pause_s: float = 0.005
) -> Iterator[tuple[Load, Readers]]:
    """Run a producer that remembers acknowledged records, and a group that records what it reads. At the end compare
    the two.
    """
    bootstrap = bootstrap_of(nodes)
    topic = create_topic(nodes[0].bootstrap, PARTITIONS)
    load = Load(bootstrap, topic, PARTITIONS, pause_s=pause_s)
    readers = Readers(bootstrap, topic, members)
    readers.start()
    load.start()
    try:
        load.wait_for(1000)
        yield load, readers
        load.wait_for(1000)
    finally:
        load.stop()
    assert_nothing_lost(load)
    readers.finish(load.acknowledged.values())


@pytest.fixture
def proxied_nodes(
    database_url: str, gateway_factory: GatewayFactory
) -> Iterator[Callable[[int], list[tuple[GatewayProcess, PostgresProxy]]]]:
    with contextlib.ExitStack() as stack:

        def start(count: int) -> list[tuple[GatewayProcess, PostgresProxy]]:
            found: list[tuple[GatewayProcess, PostgresProxy]] = []
            for _ in range(count):
                proxy = stack.enter_context(proxied(database_url))
                found.append((gateway_factory(database_url=proxy.url, environment=QUICK_TTL), proxy))
            balanced([node for node, _ in found])
            return found

        yield start


def wait(seconds: float) -> None:
    """Wait for the length of a fault."""
    threading.Event().wait(seconds)


@pytest.mark.parametrize("fault", first_always(["reset", "delay", "drop", "half-close"], 1))
def test_a_node_that_loses_its_connection_to_postgres_loses_no_record(
    proxied_nodes: Callable[[int], list[tuple[GatewayProcess, PostgresProxy]]], fault: str
) -> None:
    nodes = proxied_nodes(3)
    with under_load([node for node, _ in nodes]) as (load, _):
        for _, proxy in nodes[:2]:
            if fault == "delay":
                proxy.delay(0.05)
                load.wait_for(300)
            elif fault == "drop":
                proxy.drop()
                wait(TTL_S + 2.0)  # This is longer than the node's leases last, so other nodes acquire its groups.
            elif fault == "half-close":
                proxy.half_close()
            else:
                for _ in range(5):
                    proxy.reset()
                    load.wait_for(100)
            proxy.heal()
            load.wait_for(500)
        balanced([node for node, _ in nodes])


def test_a_restart_of_postgres_under_three_nodes_loses_no_record(gateway_factory: GatewayFactory) -> None:
    loop = LoopThread()
    with cluster_directory() as directory:
        server = EmbeddedPostgres(directory / "server")
        try:
            url = loop.run(server.start())
            loop.run(migrate_at(url))
            nodes = [gateway_factory(database_url=url) for _ in range(3)]
            balanced(nodes)
            with under_load(nodes) as (load, _):
                for _ in range(2):
                    loop.run(server.stop())
                    wait(1.0)
                    loop.run(server.start())
                    load.wait_for(500)
                balanced(nodes)
            for node in nodes:
                node.close()
        finally:
            loop.run(server.stop())
            loop.close()


async def test_a_terminated_listening_session_is_opened_again(cluster: Cluster, database_url: str) -> None:
    """From time to time the test ends the session in which each node listens for wake-ups. Readers on other nodes must
    still learn of appends.
    """
    nodes = cluster(2)
    postgres = await asyncpg.connect(database_url)

    async def listening() -> set[int]:
        rows = await postgres.fetch(
            "select pid from pg_stat_activity "
            "where datname = current_database() and application_name = 'sluice listener'"
        )
        return {row["pid"] for row in rows}

    try:
        for _ in range(3):
            before = await listening()
            assert len(before) == len(nodes), "every node listens on one session"
            await postgres.execute("select pg_terminate_backend(pid) from unnest($1::integer[]) pid", list(before))
            await until(
                listening,
                "every node listens again",
                holds=lambda now, before=before: not now & before and len(now) == len(nodes),
            )
    finally:
        await postgres.close()
    await asyncio.to_thread(_serve_a_load, nodes)


def _serve_a_load(nodes: Sequence[GatewayProcess]) -> None:
    with under_load(nodes, members=2):
        pass


async def test_a_commit_that_postgres_holds_costs_no_lease(gateway_factory: GatewayFactory, database_url: str) -> None:
    """Postgres delays the commit for longer than the group's lease lasts, and renewals of the lease succeed in the
    meantime.
    """
    node = gateway_factory(database_url=database_url, environment={"SLUICE_NODE_TTL_MS": "3000"})
    group, topic = fresh("kept"), await asyncio.to_thread(create_topic, node.bootstrap, 1)
    postgres = await asyncpg.connect(database_url)
    try:
        async with (
            await WireClient.connect(node.bootstrap) as first,
            await WireClient.connect(node.bootstrap) as second,
        ):
            one, same = Member(first, group), Member(second, group)
            await settle(one)
            same.member_id, same.generation_id = one.member_id, one.generation_id
            async with postgres.transaction():
                await postgres.execute("lock table sluice.committed_offset in share mode")
                kept = asyncio.ensure_future(one.commit(topic, 9))
                await until_blocked(postgres, 1)
                end = time.monotonic() + 4.5
                while time.monotonic() < end:
                    assert await asyncio.to_thread(metric, node, "sluice_coordinator_leases") == SHARDS
                    assert await same.heartbeat() == ErrorCode.NONE
                    await asyncio.sleep(0.1)
                assert not kept.done()
            assert await kept == ErrorCode.NONE
            assert await offset_of(group, topic, [node]) == 9
    finally:
        await postgres.close()


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed (Debian: faketime)")
@pytest.mark.long
def test_a_node_whose_clock_is_an_hour_off_acquires_no_lease_and_drops_no_record(
    gateway_factory: GatewayFactory, database_url: str
) -> None:
    """Leases, sessions and retention follow Postgres' clock. A node with a wrong clock acquires no lease and drops no
    record."""

    def off_by(hours: str) -> GatewayProcess:
        return gateway_factory(
            database_url=database_url,
            environment={"LD_PRELOAD": str(FAKETIME), "FAKETIME": hours, "DONT_FAKE_MONOTONIC": "1"},
        )

    nodes = [off_by("-1h"), gateway_factory(database_url=database_url), off_by("+1h")]
    held = balanced(nodes)
    moved = [metric(node, "sluice_coordinator_leases") for node in nodes]
    with under_load(nodes):
        wait(2 * LEASE_S)
        assert balanced(nodes) == held
        assert [metric(node, "sluice_coordinator_leases") for node in nodes] == moved
    assert all("clock" in node.log_text() for node in (nodes[0], nodes[2])), "a skew above a minute is told"


@pytest.mark.timeout(300)
@pytest.mark.long
async def test_a_node_that_sleeps_far_beyond_its_leases_is_refused_every_write(
    cluster: Cluster, database_url: str
) -> None:
    """A node is stopped by SIGSTOP for 20 s. Afterwards Postgres refuses what the node was about to write, and requests
    that arrived in the meantime are refused too.
    """
    nodes = cluster(3)
    group, topic = fresh("asleep"), await asyncio.to_thread(create_topic, nodes[0].bootstrap, 1)
    asleep = await coordinator_of(group, nodes)
    assert asleep is not None
    others = [node for node in nodes if node is not asleep]
    postgres = await asyncpg.connect(database_url)

    async def epochs() -> dict[tuple[str, int], int]:
        rows = await postgres.fetch("select kind, shard, lease_epoch from sluice.coordinator_lease")
        return {(row["kind"], row["shard"]): row["lease_epoch"] for row in rows}

    with contextlib.ExitStack() as stack:
        load, _ = await asyncio.to_thread(stack.enter_context, under_load(nodes))
        stack.callback(asleep.send_signal, signal.SIGCONT)
        clients = [await WireClient.connect(asleep.bootstrap) for _ in range(2)]
        one, two = (Member(client, group, session_timeout_ms=120_000) for client in clients)
        await settle(one, two)
        assert await one.commit(topic, 7) == ErrorCode.NONE
        before, generation_id = await epochs(), one.generation_id
        asleep.send_signal(signal.SIGSTOP)
        slept_s = time.monotonic()
        late = [
            clients[0].send_nowait(
                HeartbeatRequest(group_id=group, generation_id=generation_id, member_id=one.member_id), 4
            ),
            # The answer waits while the node sleeps, which is longer than 20 s on a busy machine.
            asyncio.ensure_future(one.commit(topic, 1, seconds=240)),
            clients[1].send_nowait(
                HeartbeatRequest(group_id=group, generation_id=generation_id, member_id=two.member_id), 4
            ),
        ]
        await goes_on(one, others, LEASE_S + 10.0)
        # The group continues on another node with another generation and other offsets.
        owner = await coordinator_of(group, others)
        assert owner in others
        for member in (one, two):
            member.client = await WireClient.connect(owner.bootstrap)
            clients.append(member.client)
        await settle(one, two)
        assert one.generation_id > generation_id
        assert await one.commit(topic, 9) == ErrorCode.NONE
        await asyncio.to_thread(balanced, others)
        await asyncio.to_thread(load.wait_for, 500)
        await asyncio.to_thread(wait, slept_s + 20.0 - time.monotonic())

        asleep.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(metric, asleep, "sluice_coordinator_leases") == 0, "a second owner"
        answers = await asyncio.wait_for(asyncio.gather(*late), 30)
        assert [answers[0].error_code, answers[1], answers[2].error_code] == [ErrorCode.NOT_COORDINATOR] * 3
        assert await one.heartbeat() in (ErrorCode.NONE, ErrorCode.NOT_COORDINATOR), "it may be handed over by now"
        await asyncio.to_thread(balanced, nodes)
        assert await goes_on(one, nodes, 10.0) < 10.0
        assert await offset_of(group, topic, nodes) == 9
        after = await epochs()
        assert all(after[shard] >= epoch for shard, epoch in before.items()), "an epoch fell"
        assert "the registration had expired" in asleep.log_text()
        for client in clients:
            await client.close()
        await asyncio.to_thread(load.wait_for, 500)
        # At its end the context compares what was produced with what was read.
        await asyncio.to_thread(stack.close)
    await postgres.close()


@pytest.mark.timeout(2 * CHURN_S + 240)
@pytest.mark.long
def test_nodes_that_stop_and_return_under_load_lose_no_record(cluster: Cluster) -> None:
    """Three nodes in turn stop, die, sleep and return. SLUICE_TEST_CHURN_SECONDS makes the test longer."""
    generator = random.Random(8)
    nodes = cluster(3)
    with under_load(nodes, pause_s=0.05) as (load, _):
        until = time.monotonic() + CHURN_S
        while time.monotonic() < until:
            node = generator.choice(nodes)
            how = generator.choice(["stop", "kill", "sleep"])
            print(f"{how} {node.bootstrap}")
            if how == "sleep":
                node.send_signal(signal.SIGSTOP)
                wait(generator.uniform(1.0, min(4 * LEASE_S, CHURN_S / 4)))
                node.send_signal(signal.SIGCONT)
            else:
                node.stop() if how == "stop" else node.kill()
                wait(generator.uniform(0.0, LEASE_S))
                node.restart()
            load.wait_for(200)
        balanced(nodes)
