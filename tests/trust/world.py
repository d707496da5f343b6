"""The cluster under attack: a Postgres that syncs its writes, nodes, and a proxy on each connection that a fault may
cut.

The one idea: faults and workloads use this module, and this module uses neither. Everything in it is a separate process
or proxy, started as a user starts it. `root` holds the sources, which may be those of a mutant.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import asyncpg
import psutil

from gateway.coordinator.facts import Departure
from storage.embedded import EmbeddedPostgres
from tests.cluster.proxy import PostgresProxy, proxied
from tests.disks import Disk as SmallDisk
from tests.disks import mounted_at
from tests.gateway_process import ROOT, GatewayProcess, find_coordinator, free_ports
from tests.objects.s3_server import BUCKET, PROGRAMS, Fault, FaultyRoad, S3Server
from tests.postgres import LoopThread, short_directory
from tests.standby import ReplicatedPostgres, running, sleeping, suspend
from tests.trust.links import Link
from tests.trust.powercut import Disk, Lost, compiler

CONNECTIONS = 200
POSTGRES_S = 120.0
"""How long Postgres may take to stop, or to recover."""
POLL_S = 0.02
CLOCK_LIBRARY = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)
"""The library that shifts the clock of a process (libfaketime), None if it is not installed."""
_REASONS = "|".join(re.escape(each.value) for each in Departure if each is not Departure.LEFT)
REMOVED = re.compile(f"member (?P<client>.+)-[0-9a-f-]{{36}} (?:{_REASONS})")
NODE_START_S = 240.0
"""How long a node may take until it serves. Other tests may keep the machine busy, and Postgres may have to recover."""
NODE_TTL_MS = 5_000
LOCKED_TABLES = ("partition", "committed_offset", "consumer_group", "transactional_producer", "coordinator_lease")
"""Tables whose rows another session may lock, as an administrator's forgotten transaction does."""

QUOTAS = ("producer_byte_rate", "consumer_byte_rate")
"""Quotas by which a fault limits clients."""

SETTINGS = {
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "auto.create.topics.enable": "false",
    "log.cleaner.backoff.ms": "1000",
}
"""Settings of every node. Heartbeats and compactions are frequent, so that a short run has many of them."""


class Store(StrEnum):
    """Kinds of places where records are stored."""

    POSTGRES = "Postgres"
    SEGMENTS = "a directory of segments"
    SMALL_DISK = "segments on a disk that can be filled"
    BUCKET = "a bucket"


STORED: Mapping[Store, Mapping[str, str]] = {
    Store.POSTGRES: {},
    # Segments receive most commits at once, and the others soon.
    Store.SEGMENTS: {"log.store.inline.max.bytes": "100", "log.store.roll.ms": "2000"},
    Store.SMALL_DISK: {"log.store.inline.max.bytes": "100", "log.store.roll.ms": "2000"},
    Store.BUCKET: {"log.store.roll.ms": "1000", "log.retention.check.interval.ms": "1000"},
}
"""Settings of nodes for each store."""
DISK_MB = 2_000
"""Size of the disk that a fault can fill. Each node that is killed leaves two segments of 64 MB there for some minutes.
"""


@dataclass
class Node:
    """One gateway with its two proxies: to its clients and to Postgres."""

    process: GatewayProcess
    link: Link
    postgres: PostgresProxy
    clock: Path
    """File with the offset of the node's clock, in libfaketime's form."""
    asleep: bool = field(default=False)

    @property
    def name(self) -> str:
        return self.link.address

    def sleep(self) -> None:
        self.asleep = True
        self.process.send_signal(signal.SIGSTOP)

    def move_clock(self, seconds: int) -> None:
        """Shift the node's wall clock by this much from now on. The node notices within a second."""
        self.clock.write_text(f"{seconds:+d}\n")

    def wake(self) -> None:
        if self.asleep:
            self.asleep = False
            self.process.send_signal(signal.SIGCONT)


@dataclass(frozen=True)
class Bucket:
    """An S3 server, and the proxy between it and the nodes."""

    server: S3Server
    road: FaultyRoad

    @property
    def environment(self) -> Mapping[str, str]:
        return {"SLUICE_LOG_STORE": f"s3://{BUCKET}/run", **self.server.environment(self.road.port)}

    def kill(self) -> None:
        """Kill the server by SIGKILL and start it again with its stored objects."""
        self.server.kill()
        self.server.start()

    def heal(self) -> None:
        self.road.set(Fault.NONE)


@contextlib.contextmanager
def bucket(directory: Path) -> Iterator[Bucket]:
    directory.mkdir(mode=0o711)
    server = S3Server(next(iter(PROGRAMS)), directory)
    server.start()
    try:
        with FaultyRoad(server.port) as road:
            yield Bucket(server, road)
    finally:
        server.kill()


class World:
    def __init__(
        self,
        loop: LoopThread,
        directory: Path,
        root: Path,
        *,
        store: Store,
        standby: bool,
        postgres: Mapping[str, str],
    ) -> None:
        self._loop = loop
        self._directory = directory
        self._root = root
        self._stack = contextlib.ExitStack()
        self.nodes: list[Node] = []
        self._snapshot: asyncpg.Connection | None = None
        self._limited = False
        cuttable = compiler() is not None and not standby and store is not Store.SMALL_DISK
        self.disk = Disk(directory) if cuttable else None
        """The disk with simulated power cuts. It is None if no C compiler exists, if there is a standby, or if the
        small disk is used: then the files are on two file systems.
        """
        files = directory if self.disk is None else self.disk.watched
        programs = None if self.disk is None else self.disk.postgres_programs(directory / "programs")
        self._environment = {"SLUICE_NODE_TTL_MS": str(NODE_TTL_MS)}
        if self.disk is not None:
            self._environment |= self.disk.environment
        self._settings = {**SETTINGS, **STORED[store]}
        self.small_disk: SmallDisk | None = None
        self.bucket: Bucket | None = None
        match store:
            case Store.SEGMENTS:
                self._environment["SLUICE_LOG_STORE"] = str(files / "log")
            case Store.SMALL_DISK:
                self.small_disk = self._stack.enter_context(mounted_at(directory / "small", DISK_MB))
                self._environment["SLUICE_LOG_STORE"] = str(self.small_disk.directory / "log")
            case Store.BUCKET:
                self.bucket = self._stack.enter_context(bucket(directory / "s3"))
                self._environment |= self.bucket.environment
            case Store.POSTGRES:
                pass
        self._pair = ReplicatedPostgres(loop, files, CONNECTIONS, postgres) if standby else None
        """The server and its standby, None if only a single server runs (`_single`)."""
        self._single = EmbeddedPostgres(files / "postgres", CONNECTIONS, programs=programs, settings=postgres)
        if self._pair is None:
            loop.run(self._single.start())
            self._stack.callback(lambda: loop.run(self._single.stop()))
        else:
            self._stack.callback(self._pair.stop)

    @property
    def bootstrap(self) -> str:
        """Addresses of all client proxies, in librdkafka's form."""
        return ",".join(node.link.address for node in self.nodes)

    def start_node(self) -> Node:
        """Start one more node and wait until it serves."""
        index = len(self.nodes)
        link_port, port = free_ports(2)
        postgres = self._stack.enter_context(proxied(self.database_url))
        directory = self._directory / f"node-{index}"
        directory.mkdir(mode=0o711)
        clock = directory / "clock"
        process = GatewayProcess(
            directory,
            database_url=postgres.url,
            settings={
                **self._settings,
                "listeners": f"PLAINTEXT://127.0.0.1:{port}",
                "advertised.listeners": f"PLAINTEXT://127.0.0.1:{link_port}",
            },
            environment=self._environment | _with_clock(clock, self._environment),
            root=self._root,
            start_s=NODE_START_S,
        )
        link = Link(self._loop, link_port, port)
        node = Node(process, link, postgres, clock)
        node.move_clock(0)
        self._stack.callback(link.close)
        self._stack.callback(process.close)
        self._stack.callback(node.wake)
        process.start()
        find_coordinator(process.bootstrap)
        self.nodes.append(node)
        return node

    # --- Postgres -----------------------------------------------------------------------------------------------

    @property
    def _server(self) -> EmbeddedPostgres:
        return self._single if self._pair is None else self._pair.primary

    @property
    def database_url(self) -> str:
        return self._server.url

    def kill_postgres(self) -> None:
        """Kill the postmaster by SIGKILL; the embedded server starts another, which recovers from the WAL."""
        os.kill(running(self._server).pid, signal.SIGKILL)

    def sleeping_standby(self) -> contextlib.AbstractContextManager[None]:
        assert self._pair is not None, "there is no standby"
        return self._pair.sleeping_standby()

    def fail_over(self) -> None:
        """Freeze the primary, promote its standby, and connect all nodes to the standby. Then make a new standby."""
        assert self._pair is not None, "there is no standby"
        url = self._pair.fail_over()
        for node in self.nodes:
            node.postgres.move(url)
        self._release_snapshot()
        self._pair.retire()

    def sleeping_postgres(self) -> contextlib.AbstractContextManager[None]:
        """Stop every process of the server by SIGSTOP for as long as the context lasts."""
        return sleeping(self._server)

    def cut_power(self, chance: random.Random | None) -> Lost:
        """Kill all nodes and Postgres, and undo the writes that they had not synced. Then start Postgres.

        With `chance`, a part of the unsynced writes survives. The caller starts the nodes.
        """
        assert self.disk is not None, "there is no C compiler"
        with self.disk.off():
            stopped = suspend(self._server)
            for node in self.nodes:
                node.wake()
                node.process.kill()
            lost = self._loop.run(self._die(stopped, self.disk, chance))
            self.disk.speed_up()  # Postgres syncs thousands of files when it starts
        self._loop.run(self._until_postgres_answers())
        return lost

    @staticmethod
    async def _die(stopped: Sequence[psutil.Process], disk: Disk, chance: random.Random | None) -> Lost:
        """Kill Postgres and undo its unsynced writes. The event loop must not run in between, because the embedded
        server would then write files for its next start.
        """
        for process in stopped:
            process.kill()
        _until_dead(stopped)
        return disk.take_back(chance)

    @contextlib.contextmanager
    def locked_rows(self, table: str) -> Iterator[None]:
        """Lock every row of one of LOCKED_TABLES for as long as the context lasts."""
        assert table in LOCKED_TABLES
        session = self._loop.run(self._begin(f"begin; select 1 from sluice.{table} for no key update"))
        try:
            yield
        finally:
            self._loop.run(_terminated(session))

    def hold_snapshot(self) -> bool:
        """Hold a snapshot of the database until the next call or the end; return whether one was held before."""
        released = self._release_snapshot()
        self._snapshot = self._loop.run(
            self._begin("begin isolation level repeatable read; select 1 from sluice.cluster")
        )
        return released

    def _release_snapshot(self) -> bool:
        if self._snapshot is None:
            return False
        self._loop.run(_terminated(self._snapshot))
        self._snapshot = None
        return True

    async def _begin(self, statements: str) -> asyncpg.Connection:
        """Return a session with an open transaction that has run `statements`. Try again if Postgres is still starting,
        or if it aborts the transaction to end a deadlock.
        """
        deadline_s = time.monotonic() + POSTGRES_S
        while True:
            await self._until_postgres_answers()
            try:
                session = await asyncpg.connect(self.database_url)
                await session.execute(statements)
            except (OSError, asyncpg.PostgresError):
                if time.monotonic() > deadline_s:
                    raise
            else:
                return session

    async def _until_postgres_answers(self) -> None:
        deadline_s = time.monotonic() + POSTGRES_S
        while True:
            try:
                connection = await asyncpg.connect(self.database_url)
            except (OSError, asyncpg.PostgresError) as error:
                if time.monotonic() > deadline_s:
                    raise AssertionError("Postgres does not recover") from error
                await asyncio.sleep(POLL_S)
            else:
                await connection.close()
                return

    def heal(self) -> None:
        """End every lasting fault: wake nodes, set clocks, open proxies, release snapshots, start nodes that are down,
        and remove quotas.
        """
        self._release_snapshot()
        if self.disk is not None:
            self.disk.speed_up()
        if self.small_disk is not None:
            self.small_disk.empty()
        if self.bucket is not None:
            self.bucket.heal()
        for node in self.nodes:
            node.wake()
            node.move_clock(0)
            node.link.heal()
            node.postgres.heal()
            if not node.process.running:
                node.process.start()
        if self._limited:
            self.limit_clients(None)

    def limit_clients(self, bytes_per_s: int | None) -> None:
        """Set the quota of every client id for produced and for consumed bytes, or remove it (None)."""
        if bytes_per_s is None:
            self._quotas("remove")
        else:
            self._quotas("set", *(f"{quota}={bytes_per_s}" for quota in QUOTAS))
        self._limited = bytes_per_s is not None

    def _quotas(self, verb: str, *values: str) -> None:
        """Change the quota by the command line, at the first node's own address. Repeat the command if it fails."""
        command = [sys.executable, "-m", "gateway.cli", "quotas", verb, *values, "--default-client-id"]
        deadline_s = time.monotonic() + POSTGRES_S
        while True:
            done = subprocess.run(
                [*command, "--bootstrap", self.nodes[0].process.bootstrap],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            # A removal whose answer was lost fails when it is repeated.
            if not done.returncode or (verb == "remove" and "there is no quota" in done.stderr):
                return
            if time.monotonic() > deadline_s:
                raise AssertionError(f"sluice quotas {verb}: {done.stderr}")

    def removed_members(self) -> Mapping[tuple[str, str], Sequence[float] | None]:
        """Return group and client id of each member that the coordinator removed without a request, with the times of
        the removals according to the journal. The times are None if the nodes' logs name more removals: a node that is
        killed loses the events that it has not written to the journal yet.
        """
        found: dict[tuple[str, str], list[float] | None] = {}
        for member, at_s in self._loop.run(self._removed_members()):
            found[member] = [*(found.get(member) or ()), at_s]
        logged = sum((removed_in(node.process.log_text()) for node in self.nodes), Counter[tuple[str, str]]())
        return {**found, **{member: None for member, times in logged.items() if times > len(found.get(member) or ())}}

    async def _removed_members(self) -> list[tuple[tuple[str, str], float]]:
        connection = await asyncpg.connect(self.database_url)
        try:
            # Postgres runs on this machine and by its clock. A member that was fenced is a static member whose next
            # client has joined, so it owns nothing any more.
            rows = await connection.fetch(
                "select distinct gone.seq, gone.group_id, joined.client_id, extract(epoch from gone.written_at) as at_s"
                " from sluice.journal_event gone join sluice.journal_event joined using (group_id, member_id)"
                " where gone.kind = 'member_expired' and joined.kind = 'member_joined'"
            )
        finally:
            await connection.close()
        since_s = time.time() - time.monotonic()
        return [((row["group_id"], row["client_id"]), float(row["at_s"]) - since_s) for row in rows]

    def group_state(self, group: str) -> str:
        """Return the rows of a group, its members and the last events of its journal, one JSON object per line."""
        return self._loop.run(self._group_state(group))

    async def _group_state(self, group: str) -> str:
        connection = await asyncpg.connect(self.database_url)
        try:
            rows = await connection.fetch(
                "select row_to_json(g)::text as line from sluice.consumer_group g where group_id = $1"
                " union all select row_to_json(m)::text from sluice.group_member m where group_id = $1"
                " union all (select row_to_json(e)::text from sluice.journal_event e where group_id = $1"
                "            order by e.seq desc limit 300)",
                group,
            )
        finally:
            await connection.close()
        return "\n".join(row["line"] for row in rows)

    def logs(self) -> Mapping[str, str]:
        """Return the last lines of each node's log, by the name `node-` with the node's port."""
        return {f"node-{node.name.rpartition(':')[2]}": node.process.log_tail() for node in self.nodes}

    def close(self) -> None:
        self._release_snapshot()
        self._stack.close()


async def _terminated(session: asyncpg.Connection) -> None:
    """End a session without waiting for its server process."""
    session.terminate()


def _with_clock(clock: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that let a process read the offset of its wall clock from the file `clock`."""
    if CLOCK_LIBRARY is None:
        return {}
    return {
        "LD_PRELOAD": ":".join(filter(None, (environment.get("LD_PRELOAD"), str(CLOCK_LIBRARY)))),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }


def _until_dead(processes: Sequence[psutil.Process]) -> None:
    """Wait until the processes have ended. The process that started them reaps them."""
    deadline_s = time.monotonic() + POSTGRES_S
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline_s, f"{process} does not end"
                time.sleep(POLL_S)


@contextlib.contextmanager
def world(
    nodes: int,
    root: Path = ROOT,
    *,
    store: Store = Store.POSTGRES,
    standby: bool = False,
    postgres: Mapping[str, str] | None = None,
) -> Iterator[World]:
    """Start Postgres and `nodes` nodes from the sources in `root`, and stop everything afterwards.

    All nodes use the same `store`. With `standby`, commits wait for a standby to which Postgres can fail over.
    `postgres` holds server settings that override those of the embedded server.
    """
    loop = LoopThread()
    try:
        with short_directory() as directory:
            made = World(*(loop, directory, root), store=store, standby=standby, postgres=postgres or {})
            try:
                for _ in range(nodes):
                    made.start_node()
                yield made
            finally:
                made.close()
    finally:
        loop.close()


def removed_in(log: str) -> Counter[tuple[str, str]]:
    """Count the removals of members without a request, by group and client id, according to a node's log. The id
    of a classic member begins with its client id. A KIP-848 member's id does not, so this function does not find such
    members.
    """
    found: Counter[tuple[str, str]] = Counter()
    for line in log.splitlines():
        if '"facts"' not in line or not line.startswith("{"):
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue  # a killed node may leave an incomplete line
        for fact in event["facts"]:
            match = REMOVED.fullmatch(fact)
            if match:
                found[event["group_id"], match["client"]] += 1
    return found
