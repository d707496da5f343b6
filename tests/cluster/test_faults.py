"""Nodes that Postgres, the network between or a clock fails: stock clients go on, and nothing acknowledged is lost."""

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

from storage.embedded import EmbeddedPostgres
from storage.migrate import migrate
from storage.pool import Database
from tests.chaos.load import Load, assert_nothing_lost
from tests.clients.topics import create_topic
from tests.cluster.conftest import Cluster, balanced, metric
from tests.cluster.proxy import PostgresProxy, proxied
from tests.cluster.readers import Readers
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.postgres import LoopThread, short_directory

PARTITIONS = 6
LEASE_S = 5.0
CHURN_S = float(os.environ.get("SLUICE_TEST_CHURN_SECONDS", "40"))
FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


def bootstrap_of(nodes: Sequence[GatewayProcess]) -> str:
    return ",".join(node.bootstrap for node in nodes)


@contextlib.contextmanager
def under_load(nodes: Sequence[GatewayProcess], *, members: int = 3) -> Iterator[tuple[Load, Readers]]:
    """A producer that remembers what was acknowledged and a group that writes down what it was given; judged after."""
    bootstrap = bootstrap_of(nodes)
    topic = create_topic(nodes[0].bootstrap, PARTITIONS)
    load = Load(bootstrap, topic, PARTITIONS)
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
                found.append((gateway_factory(database_url=proxy.url), proxy))
            balanced([node for node, _ in found])
            return found

        yield start


def wait(seconds: float) -> None:
    """The length of a fault."""
    threading.Event().wait(seconds)


@pytest.mark.parametrize("fault", ["delay", "drop", "half-close", "reset"])
def test_a_node_whose_way_to_postgres_fails_loses_nothing(
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
                wait(LEASE_S + 2.0)  # past its leases: others take its groups
            elif fault == "half-close":
                proxy.half_close()
            else:
                for _ in range(5):
                    proxy.reset()
                    load.wait_for(100)
            proxy.heal()
            load.wait_for(500)
        balanced([node for node, _ in nodes])


def test_postgres_restarts_under_three_nodes(gateway_factory: GatewayFactory) -> None:
    loop = LoopThread()
    with short_directory() as directory:
        server = EmbeddedPostgres(directory / "server")
        try:
            url = loop.run(server.start())
            loop.run(_migrate(url))
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


async def _migrate(url: str) -> None:
    database = await Database.open(url)
    try:
        await migrate(database)
    finally:
        await database.close()


async def test_a_listening_session_that_is_ended_is_opened_again(cluster: Cluster, database_url: str) -> None:
    """Whoever listens for wake-ups loses its session now and then; readers elsewhere still hear of appends."""
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
            deadline = time.monotonic() + 10
            while (now := await listening()) & before or len(now) < len(nodes):
                assert time.monotonic() < deadline, "nobody listens again"
                await asyncio.sleep(0.05)
    finally:
        await postgres.close()
    await asyncio.to_thread(_serve_a_load, nodes)


def _serve_a_load(nodes: Sequence[GatewayProcess]) -> None:
    with under_load(nodes, members=2):
        pass


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed (Debian: faketime)")
def test_clocks_that_are_an_hour_apart(gateway_factory: GatewayFactory, database_url: str) -> None:
    """Leases, sessions and retention go by Postgres' clock: a node whose own is wrong takes nothing, drops nothing."""

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


@pytest.mark.timeout(CHURN_S + 240)
def test_nodes_that_come_and_go_under_load(cluster: Cluster) -> None:
    """Three nodes stop, die, sleep and come back in turn; SLUICE_TEST_CHURN_SECONDS makes it longer."""
    generator = random.Random(8)
    nodes = cluster(3)
    with under_load(nodes) as (load, _):
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
