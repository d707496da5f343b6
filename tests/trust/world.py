"""The cluster under attack: a Postgres that syncs, nodes, and a link on every way that a fault may cut.

The one idea: faults and workloads know the world, and the world knows neither. Everything in it is a process or a link
of its own, started as a user starts it, from the sources in `root`, which may be those of a mutant.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
import psutil

from storage.embedded import EmbeddedPostgres
from tests.cluster.proxy import PostgresProxy, proxied
from tests.gateway_process import ROOT, GatewayProcess, find_coordinator, free_ports
from tests.postgres import LoopThread, short_directory
from tests.trust.links import Link

CONNECTIONS = 200
NODE_TTL_MS = 5_000

SETTINGS = {
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "auto.create.topics.enable": "false",
    "log.cleaner.backoff.ms": "1000",
}
"""Settings of every node. Heartbeats and compactions are frequent, so that a short run has many of them."""


@dataclass
class Node:
    """One gateway with its two links."""

    process: GatewayProcess
    link: Link
    postgres: PostgresProxy
    asleep: bool = field(default=False)

    @property
    def name(self) -> str:
        return self.link.address

    def sleep(self) -> None:
        self.asleep = True
        self.process.send_signal(signal.SIGSTOP)

    def wake(self) -> None:
        if self.asleep:
            self.asleep = False
            self.process.send_signal(signal.SIGCONT)


class World:
    def __init__(self, loop: LoopThread, directory: Path, root: Path) -> None:
        self._loop = loop
        self._directory = directory
        self._root = root
        self._stack = contextlib.ExitStack()
        self.nodes: list[Node] = []
        self._server = EmbeddedPostgres(directory / "postgres", CONNECTIONS)
        self.database_url = loop.run(self._server.start())
        self._stack.callback(lambda: loop.run(self._server.stop()))

    @property
    def bootstrap(self) -> str:
        """Addresses of all links, in librdkafka's form."""
        return ",".join(node.link.address for node in self.nodes)

    def start_node(self) -> Node:
        """Start one more node and wait until it serves."""
        index = len(self.nodes)
        link_port, port = free_ports(2)
        postgres = self._stack.enter_context(proxied(self.database_url))
        directory = self._directory / f"node-{index}"
        directory.mkdir(mode=0o711)
        process = GatewayProcess(
            directory,
            database_url=postgres.url,
            settings={
                **SETTINGS,
                "listeners": f"PLAINTEXT://127.0.0.1:{port}",
                "advertised.listeners": f"PLAINTEXT://127.0.0.1:{link_port}",
            },
            environment={"SLUICE_NODE_TTL_MS": str(NODE_TTL_MS)},
            root=self._root,
        )
        link = Link(self._loop, link_port, port)
        node = Node(process, link, postgres)
        self._stack.callback(link.close)
        self._stack.callback(process.close)
        self._stack.callback(node.wake)
        process.start()
        find_coordinator(process.bootstrap)
        self.nodes.append(node)
        return node

    # --- Postgres -----------------------------------------------------------------------------------------------

    @property
    def _postmaster(self) -> psutil.Process:
        pid = self._server.pid
        assert pid is not None, "Postgres does not run"
        return psutil.Process(pid)

    def kill_postgres(self) -> None:
        """Kill the postmaster by SIGKILL; the embedded server starts another, which recovers from the WAL."""
        os.kill(self._postmaster.pid, signal.SIGKILL)

    @contextlib.contextmanager
    def sleeping_postgres(self) -> Iterator[None]:
        """Stop every process of the server by SIGSTOP for as long as the context lasts."""
        postmaster = self._postmaster
        postmaster.suspend()  # first, because the children that it would fork in the meantime would answer
        stopped = [postmaster, *postmaster.children(recursive=True)]
        for process in stopped[1:]:
            process.suspend()
        try:
            yield
        finally:
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    def heal(self) -> None:
        """End every fault that lasts: wake nodes, open links, start nodes that are down."""
        for node in self.nodes:
            node.wake()
            node.link.heal()
            node.postgres.heal()
            if not node.process.running:
                node.process.start()

    def removed_members(self) -> set[tuple[str, str]]:
        """Return group and client id of each member that the coordinator removed unasked, as the journal says."""
        return self._loop.run(self._removed_members())

    async def _removed_members(self) -> set[tuple[str, str]]:
        connection = await asyncpg.connect(self.database_url)
        try:
            rows = await connection.fetch(
                "select distinct gone.group_id, joined.client_id"
                " from sluice.journal_event gone join sluice.journal_event joined using (group_id, member_id)"
                " where gone.kind in ('member_expired', 'member_fenced') and joined.kind = 'member_joined'"
            )
        finally:
            await connection.close()
        return {(row["group_id"], row["client_id"]) for row in rows}

    def logs(self) -> Mapping[str, str]:
        """Return the end of each node's log by the node's name."""
        return {node.name: node.process.log_tail() for node in self.nodes}

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def world(nodes: int, root: Path = ROOT) -> Iterator[World]:
    """Start Postgres and `nodes` nodes from the sources in `root`, and stop everything afterwards."""
    loop = LoopThread()
    try:
        with short_directory() as directory:
            made = World(loop, directory, root)
            try:
                for _ in range(nodes):
                    made.start_node()
                yield made
            finally:
                made.close()
    finally:
        loop.close()
