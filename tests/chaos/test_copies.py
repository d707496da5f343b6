"""Copies of a data directory, started elsewhere.

One is a copy of a stopped node, and one of a single moment of a running node. In the third, Postgres is older than the
segments, so the copy is another history.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from confluent_kafka.admin import AdminClient  # pyright: ignore[reportPrivateImportUsage]

from storage.embedded import EmbeddedPostgres
from storage.embedded_socket import USER
from storage.postgres_programs import bin_directory
from tests.chaos.load import Load, assert_nothing_lost, read_all
from tests.clients.topics import create_topic
from tests.forks import forks
from tests.gateway_process import GatewayFactory, GatewayProcess
from tests.postgres import cluster_directory
from tests.steps.command import sluice
from tests.steps.waiting import until, wait_for

PARTITIONS = 4
DEADLINE_S = 60.0
SETTINGS = {"group.initial.rebalance.delay.ms": "0", "log.store.inline.max.bytes": "1000"}
"""Settings with which segments hold most records."""

Records = dict[tuple[int, int], bytes]


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    with cluster_directory() as directory:
        yield directory / "data"


@contextlib.contextmanager
def started(directory: Path) -> Iterator[GatewayProcess]:
    """Start a node with its own Postgres on a copy.

    Wait until the copy no longer lists the original's nodes. It lists them until their registrations have expired, and
    in this test the original nodes are still alive.
    """
    node = GatewayProcess(directory, database_url=None, settings=SETTINGS, environment={}, forks=forks())
    node.start()
    try:
        admin = AdminClient({"bootstrap.servers": node.bootstrap})
        wait_for(lambda: admin.list_topics(timeout=10).brokers, "one broker", holds=lambda named: len(named) == 1)
        yield node
    finally:
        node.close()


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


def epochs(node: GatewayProcess) -> set[int]:
    async def ask() -> set[int]:
        url = EmbeddedPostgres(node.data_dir).running_url()
        assert url is not None
        connection = await asyncpg.connect(url)
        try:
            return {row["leader_epoch"] for row in await connection.fetch("select leader_epoch from sluice.partition")}
        finally:
            await connection.close()

    return asyncio.run(ask())


def is_whole(node: GatewayProcess) -> subprocess.CompletedProcess[str]:
    """Run `sluice check` against a running node. Return whether it found no fault."""
    return sluice("check", "--data-dir", str(node.data_dir))


def loaded(gateway: GatewayProcess, count: int) -> Load:
    load = Load(gateway.bootstrap, create_topic(gateway.bootstrap, PARTITIONS), PARTITIONS)
    load.start()
    load.wait_for(count)
    return load


def assert_goes_on(node: GatewayProcess, topic: str, before: Records) -> None:
    """Assert that the node appends new records behind its existing ones."""
    more = Load(node.bootstrap, topic, PARTITIONS)
    more.start()
    more.wait_for(500)
    more.stop()
    assert not more.failed, more.failed[:3]
    after = read_all(node.bootstrap, topic, PARTITIONS)
    assert {place: after[place] for place in before} == before
    assert all(after[place] == value for value, place in more.acknowledged.items())
    assert not before.keys() & set(more.acknowledged.values()), "an offset was given twice"


def test_a_copy_of_a_stopped_node_serves_what_the_node_did(gateway_factory: GatewayFactory, elsewhere: Path) -> None:
    gateway = gateway_factory(SETTINGS, embedded=True)
    load = loaded(gateway, 2000)
    load.stop()
    assert gateway.stop() == 0
    copy(gateway.data_dir, elsewhere)
    gateway.start()
    assert_nothing_lost(load)
    records = read_all(gateway.bootstrap, load.topic, PARTITIONS)
    with started(elsewhere) as node:
        assert read_all(node.bootstrap, load.topic, PARTITIONS) == records
        assert epochs(node) == epochs(gateway), "the same history goes on"
        checked = is_whole(node)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert_goes_on(node, load.topic, records)


@pytest.mark.long
def test_a_copy_of_one_moment_of_a_running_node_has_every_acknowledged_record(
    gateway_factory: GatewayFactory, elsewhere: Path
) -> None:
    """The copy is like a snapshot of the file system: both processes are stopped, so `cp` copies one moment."""
    gateway = gateway_factory(SETTINGS, embedded=True)
    load = loaded(gateway, 2000)
    gateway.pause_postgres()
    gateway.send_signal(signal.SIGSTOP)
    acknowledged = dict(load.acknowledged)
    copy(gateway.data_dir, elsewhere)
    gateway.send_signal(signal.SIGCONT)
    gateway.resume_postgres()
    load.wait_for(500)
    load.stop()
    assert_nothing_lost(load)
    original = read_all(gateway.bootstrap, load.topic, PARTITIONS)
    gateway.kill()  # The copy still names the original, to which it would redirect clients.
    with started(elsewhere) as node:
        records = read_all(node.bootstrap, load.topic, PARTITIONS)
        missing = [value for value, place in acknowledged.items() if records.get(place) != value]
        assert not missing, f"{len(missing)} acknowledged records are not in the copy"
        assert records.items() <= original.items()
        assert_goes_on(node, load.topic, records)


def test_a_copy_that_is_older_than_its_segments_is_another_history(
    gateway_factory: GatewayFactory, elsewhere: Path
) -> None:
    """Copy Postgres by `pg_basebackup`, and then copy the segments under the lock that prevents their removal
    (docs/operate.md).
    """
    gateway = gateway_factory(SETTINGS, embedded=True)
    load = loaded(gateway, 2000)
    acknowledged = dict(load.acknowledged)
    elsewhere.mkdir(mode=0o711)
    asyncio.run(copy_while_it_runs(gateway, load, elsewhere))
    load.stop()
    assert_nothing_lost(load)
    original, epoch = read_all(gateway.bootstrap, load.topic, PARTITIONS), max(epochs(gateway))
    gateway.kill()
    with started(elsewhere) as node:
        records = read_all(node.bootstrap, load.topic, PARTITIONS)
        missing = [value for value, place in acknowledged.items() if records.get(place) != value]
        assert not missing, f"{len(missing)} records that were acknowledged before the copy are not in it"
        assert records.items() < original.items()
        assert "the database was restored to an earlier state" in node.log_text()
        assert min(epochs(node)) > epoch
        checked = is_whole(node)
        wrong = [line for line in checked.stdout.splitlines() if "partition " in line and "offset" in line]
        assert not wrong, checked.stdout
        assert_goes_on(node, load.topic, records)


async def copy_while_it_runs(gateway: GatewayProcess, load: Load, target: Path) -> None:
    server = EmbeddedPostgres(gateway.data_dir)
    url = server.running_url()
    assert url is not None
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("select pg_advisory_lock_shared(5492300417)")
        host = str(gateway.data_dir / "socket")
        to = str(target / "postgres")
        base_backup = [str(bin_directory() / "pg_basebackup"), "-h", host, "-U", USER, "-D", to, "-c", "fast"]
        done = await asyncio.to_thread(subprocess.run, base_backup, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (memory,) = (gateway.data_dir / "log").glob("sluice-history-*.json")
        written = memory.stat().st_mtime_ns
        await asyncio.to_thread(load.wait_for, 500)
        await until(lambda: memory.stat().st_mtime_ns != written, "the node remembers what it acknowledged")
        await asyncio.to_thread(copy, gateway.data_dir / "log", target / "log")
    finally:
        await connection.close()
