"""`sluice serve --workers`, `sluice nodes`, and nodes with the same address. The tests use real processes and a stock
client.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import psutil
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient

from gateway.config.errors import ConfigurationError
from gateway.config.settings import load
from gateway.operate.workers import named, plan
from storage.postgres_programs import find_programs
from tests.clients.topics import create_topic
from tests.gateway_process import ROOT, GatewayFactory, answers, clean_environment, free_ports
from tests.postgres import cluster_directory
from tests.steps.command import interpreted, sluice
from tests.steps.waiting import wait_for

WORKERS = 3
PORTS_OF_A_HOST = 20
"""The workers' listeners have the first ports, their metrics the ports from the tenth on."""

PATIENCE_S = 60.0

T = TypeVar("T")


def first_port() -> int:
    """Return the first of the ports of a host, none of which has a listener."""
    (port,) = free_ports(1, in_a_row=PORTS_OF_A_HOST)
    return port


def listening_child(pid: int, port: int) -> psutil.Process:
    return next(
        child
        for child in psutil.Process(pid).children(recursive=True)
        for connection in child.net_connections()
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    )


class Host:
    """`sluice serve --workers` on ports of its own."""

    def __init__(self, directory: Path, *more: str) -> None:
        self.directory, self.port = directory, first_port()
        self.bootstraps = [f"127.0.0.1:{self.port + number}" for number in range(WORKERS)]
        self.metrics = [f"http://127.0.0.1:{self.port + 10 + number}" for number in range(WORKERS)]
        self._log, self._said = directory / "host.log", directory / "host.out"
        with self._log.open("wb") as log, self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gateway.cli", "serve", "--workers", str(WORKERS)),
                    *("--listen", self.bootstraps[0], "--metrics-listen", f"127.0.0.1:{self.port + 10}"),
                    *("--data-dir", str(directory / "data"), *more),
                ],
                cwd=ROOT,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=log,
            )

    def serving(self) -> Host:
        wait_for(lambda: self.process.poll() is not None or self.said(), self.log())
        assert self.process.poll() is None, self.log()
        return self

    def said(self) -> str:
        return self._said.read_text()

    def log(self) -> str:
        return self._log.read_text()

    def worker(self, number: int) -> psutil.Process:
        """Return the process that listens on this worker's port."""
        return listening_child(self.process.pid, self.port + number)

    def nodes(self, *where: str) -> list[dict[str, Any]]:
        found = sluice("nodes", "--json", *(where or ("--data-dir", str(self.directory / "data"))))
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)


@pytest.fixture
def host() -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []
    with cluster_directory() as directory:

        def start(*more: str) -> Host:
            hosts.append(Host(directory, *more))
            return hosts[-1]

        try:
            yield start
        finally:
            for each in hosts:
                if each.process.poll() is None:
                    each.process.terminate()
                    each.process.wait(PATIENCE_S)


def round_trip(bootstraps: Sequence[str], topic: str, values: Sequence[bytes]) -> list[bytes]:
    """Write values with a stock client, read them back, and return them."""
    producer = Producer({"bootstrap.servers": ",".join(bootstraps), "enable.idempotence": True})
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(PATIENCE_S) == 0
    consumer = Consumer({"bootstrap.servers": ",".join(bootstraps), "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    read: list[bytes] = []
    try:
        deadline = time.monotonic() + PATIENCE_S
        while len(read) < len(values):
            message = consumer.poll(1.0)
            assert time.monotonic() < deadline, read
            if message is not None and message.error() is None:
                read.append(message.value() or b"")
    finally:
        consumer.close()
    return sorted(read)


def test_workers_are_nodes_of_one_cluster_on_an_embedded_postgres(host: Callable[..., Host]) -> None:
    running = host().serving()
    assert ",".join(running.bootstraps) in running.said()
    client = AdminClient({"bootstrap.servers": running.bootstraps[1]})

    def listed() -> bool:
        brokers = client.list_topics(timeout=30).brokers.values()
        return sorted(f"{broker.host}:{broker.port}" for broker in brokers) == running.bootstraps

    wait_for(listed, "a worker is missing in Metadata")
    for url in running.metrics:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            assert b"sluice_coordinator_leases" in answer.read()
    topic = create_topic(running.bootstraps[0], 6)
    values = [f"{number:04}".encode() for number in range(300)]
    assert round_trip(running.bootstraps, topic, values) == values

    def shared() -> list[dict[str, Any]] | None:
        rows = running.nodes()
        held = [row["leases"].get("groups", 0) for row in rows]
        return rows if sum(held) == 50 and min(held) > 0 and not any(row["revision_lag"] for row in rows) else None

    rows = wait_for(shared, "the leases are not shared")
    assert rows is not None
    assert sorted(row["listeners"]["PLAINTEXT"] for row in rows) == running.bootstraps
    table = interpreted("nodes", "--data-dir", str(running.directory / "data")).stdout
    assert re.search(r"^NODE .*LISTENERS .*LEASES .*REVISION-LAG", table)
    assert all(bootstrap in table for bootstrap in running.bootstraps)
    lines = [json.loads(line) for line in running.log().splitlines()]
    assert {line["node"] for line in lines} == {"supervisor", *running.bootstraps}

    ended = [running.worker(number) for number in range(WORKERS)]
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE_S) == 0, running.log()
    assert not any(process.is_running() for process in ended)
    drained = {json.loads(line)["node"] for line in running.log().splitlines() if '"draining"' in line}
    assert drained == set(running.bootstraps)


def test_a_worker_that_dies_is_started_again_while_the_others_serve(
    host: Callable[..., Host], database_url: str
) -> None:
    running = host("--database-url", database_url, "--log-format", "console").serving()
    topic = create_topic(running.bootstraps[0], 3)
    before = {row["listeners"]["PLAINTEXT"]: row["node"] for row in running.nodes("--database-url", database_url)}
    killed = running.worker(1)
    killed.kill()
    wait_for(lambda: not answers(running.bootstraps[1]), "the worker lives")
    assert answers(running.bootstraps[0])
    wait_for(lambda: answers(running.bootstraps[1]), running.log())
    again = running.worker(1)
    assert again.pid != killed.pid
    after = {row["listeners"]["PLAINTEXT"]: row["node"] for row in running.nodes("--database-url", database_url)}
    assert after == before, "a node that starts again keeps its id"
    values = [b"after", b"the", b"restart"]
    assert round_trip(running.bootstraps, topic, values) == sorted(values)
    assert re.search(rf"a worker ended.*node={running.bootstraps[1]}.*retry_in_s=0\.5", running.log())
    names = {line.partition(" | ")[0] for line in running.log().splitlines() if " | " in line}
    assert names == set(running.bootstraps)


def test_a_worker_that_cannot_be_started_again_yet_does_not_end_the_others(
    host: Callable[..., Host], database_url: str
) -> None:
    """The supervisor can open no file for a while, as on a host without memory for another process."""
    running = host("--database-url", database_url, "--log-format", "console").serving()
    supervisor = psutil.Process(running.process.pid)
    limits = supervisor.rlimit(psutil.RLIMIT_NOFILE)
    supervisor.rlimit(psutil.RLIMIT_NOFILE, (1, limits[1]))
    running.worker(1).kill()
    wait_for(lambda: "cannot be started" in running.log() or running.process.poll() is not None, running.log())
    assert running.process.poll() is None, running.log()
    assert answers(running.bootstraps[0])
    supervisor.rlimit(psutil.RLIMIT_NOFILE, limits)
    wait_for(lambda: answers(running.bootstraps[1]), running.log())


def test_a_signal_ends_workers_whose_postgres_is_still_starting(host: Callable[..., Host], tmp_path: Path) -> None:
    found = find_programs().directory
    tmp_path.chmod(0o755)
    for name, server in {"initdb": "", "postgres": '[ "$1" = -D ] && exec sleep 600\n'}.items():
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\n{server}exec '{found / name}' \"$@\"\n")
        script.chmod(0o755)
    running = host("--postgres-bin", str(tmp_path), "--log-format", "console")
    wait_for(lambda: "postgres cluster created" in running.log(), "no cluster was created")
    running.process.terminate()
    try:
        assert running.process.wait(PATIENCE_S) == 0
    finally:
        running.process.kill()


@pytest.mark.parametrize("workers", [1, 2])
def test_nodes_serve_on_after_the_reader_of_their_log_has_gone(workers: int) -> None:
    """A pipe without a reader refuses every line, as a full disk does."""
    with cluster_directory() as directory:
        port = first_port()
        bootstraps = [f"127.0.0.1:{port + number}" for number in range(workers)]
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gateway.cli", "serve", "--workers", str(workers), "--listen", bootstraps[0]),
                *("--metrics-listen", "off", "--data-dir", str(directory / "data")),
            ],
            cwd=ROOT,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            wait_for(lambda: all(map(answers, bootstraps)), "the nodes do not serve")
            topic = create_topic(bootstraps[0], 1)
            assert process.stderr is not None
            process.stderr.close()
            pid = int((directory / "data" / "postgres" / "postmaster.pid").read_text().partition("\n")[0])
            psutil.Process(pid).kill()
            assert round_trip(bootstraps, topic, [b"after the restart of Postgres"])
            if workers > 1:
                killed = listening_child(process.pid, port)
                killed.kill()
                killed.wait(PATIENCE_S)
                wait_for(lambda: all(map(answers, bootstraps)), "a worker was not started again")
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


@pytest.mark.long
def test_the_workers_end_with_a_supervisor_that_is_killed(host: Callable[..., Host], database_url: str) -> None:
    running = host("--database-url", database_url).serving()
    children = psutil.Process(running.process.pid).children(recursive=True)
    assert len(children) == WORKERS
    running.process.kill()
    running.process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not any(answers(bootstrap) for bootstrap in running.bootstraps)


@pytest.mark.long
def test_a_worker_that_cannot_start_stops_all_workers(host: Callable[..., Host], database_url: str) -> None:
    first = host("--database-url", database_url).serving()
    taken = first.bootstraps[2]
    second = host("--database-url", database_url, "--listen", taken)
    assert second.process.wait(PATIENCE_S) == 1
    assert f"cannot listen on {taken}" in second.log()
    assert answers(taken)


# --- nodes that would be one another ------------------------------------------------------------------------------


def test_a_second_node_at_the_address_of_a_live_node_is_refused_and_named(
    gateway_factory: GatewayFactory, database_url: str
) -> None:
    first = gateway_factory({"group.initial.rebalance.delay.ms": "0"}, database_url=database_url)
    port = first_port()
    common = ("--database-url", database_url, "--metrics-listen", f"127.0.0.1:{port + 10}")
    same_name = sluice("serve", "--listen", f"127.0.0.1:{port}", "--advertise", first.bootstrap, *common)
    listeners = f"listeners=PLAINTEXT://127.0.0.1:{port},SECOND://127.0.0.1:{port + 1}"
    advertised = f"advertised.listeners=PLAINTEXT://127.0.0.1:{port},SECOND://{first.bootstrap}"
    protocols = "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SECOND:PLAINTEXT"
    same_address = sluice("serve", "--set", listeners, "--set", advertised, "--set", protocols, *common)
    for refused in (same_name, same_address):
        assert refused.returncode == 1
        assert f"node 1 is alive and advertises {first.bootstrap} too" in refused.stderr
    brokers = AdminClient({"bootstrap.servers": first.bootstrap}).list_topics(timeout=30).brokers
    assert list(brokers) == [1]
    assert "registration" not in first.log_text(), "the first one was superseded"
    # A killed node does not prevent its successor from starting.
    first.kill()
    first.start()


def test_an_unreachable_advertised_address_logs_a_warning(gateway_factory: GatewayFactory, database_url: str) -> None:
    nowhere = f"127.0.0.1:{first_port()}"
    node = gateway_factory(database_url=database_url, environment={"SLUICE_ADVERTISE": nowhere})
    said = wait_for(
        lambda: [line for line in node.log_text().splitlines() if "cannot reach its own advertised address" in line],
        node.log_tail(),
    )
    assert json.loads(said[0])["address"] == nowhere
    assert json.loads(said[0])["level"] == "warning"


async def test_a_database_of_a_newer_schema_is_refused(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute("insert into sluice.schema_migration (version, file_name) values (999, 'later')")
    finally:
        await connection.close()
    port = first_port()
    refused = sluice("serve", "--workers=2", f"--listen=127.0.0.1:{port}", f"--database-url={database_url}")
    assert refused.returncode == 1
    assert "the database's schema is version 999" in refused.stderr


# --- values -------------------------------------------------------------------------------------------------------


def test_every_address_of_worker_n_is_n_ports_higher() -> None:
    protocols = "listener.security.protocol.map=A:PLAINTEXT,B:PLAINTEXT"
    flags = {"workers": "2", "metrics-listen": "127.0.0.1:9400"}
    told = "advertised.listeners=A://a:19092,B://b:19192"
    configuration = load(flags, ("listeners=A://:9092,B://:9192", told, protocols), {})
    first, second = plan(configuration)
    assert (first.name, second.name) == ("a:19092", "a:19093")
    assert "--set=listeners=A://:9093,B://:9193" in second.flags
    assert "--set=advertised.listeners=A://a:19093,B://b:19193" in second.flags
    assert "--metrics-listen=127.0.0.1:9401" in second.flags
    assert "--workers=1" in second.flags


def test_address_that_workers_share_has_one_port() -> None:
    settings = (
        "listeners=CLIENTS://:9092,NODES://:9192",
        "advertised.listeners=CLIENTS://all:19092,NODES://a:19192",
        "listener.security.protocol.map=CLIENTS:PLAINTEXT,NODES:PLAINTEXT",
        "shared.listener.names=CLIENTS",
        "inter.broker.listener.name=NODES",
    )
    first, second = plan(load({"workers": "2"}, settings, {}))
    assert (first.name, second.name) == ("a:19192", "a:19193")
    assert "--set=listeners=NODES://:9193,CLIENTS://:9093" in second.flags
    assert "--set=advertised.listeners=NODES://a:19193,CLIENTS://all:19092" in second.flags


@pytest.mark.parametrize(
    ("listen", "metrics", "reason"),
    [
        ("127.0.0.1:65535", "off", "there is no port 65536"),
        ("127.0.0.1:0", "off", "workers need consecutive ports"),
        ("127.0.0.1:9092", "127.0.0.1:9093", "127.0.0.1:9093 would be taken twice"),
    ],
)
def test_too_few_ports_for_the_workers_are_refused(listen: str, metrics: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(reason)):
        plan(load({"workers": "2", "listen": listen, "metrics-listen": metrics}, (), {}))


@pytest.mark.parametrize(
    ("line", "as_json", "passed_on"),
    [
        (b'{"event": "x", "node": "a:1"}\n', True, {"event": "x", "node": "a:1"}),
        (b"Traceback \xff\n", True, {"node": "a:1", "level": "warning", "event": "Traceback \ufffd"}),
    ],
)
def test_every_line_of_a_json_stream_is_json_and_names_its_node(
    line: bytes, as_json: bool, passed_on: dict[str, str]
) -> None:
    assert json.loads(named("a:1", line, as_json=as_json)) == passed_on


def test_every_line_for_a_person_begins_with_its_node() -> None:
    assert named("a:1", b"it broke", as_json=False) == b"a:1 | it broke\n"


@pytest.mark.parametrize("names", [("node.id",), ("broker.id",), ("node.id", "broker.id")])
def test_the_numbers_of_workers_follow_each_other(names: tuple[str, ...]) -> None:
    first, second = plan(load({"workers": "2"}, [f"{name}=5" for name in names], {}))
    assert [flag for flag in first.flags if ".id=" in flag] == [f"--set={name}=5" for name in names]
    assert [flag for flag in second.flags if ".id=" in flag] == [f"--set={name}=6" for name in names]
