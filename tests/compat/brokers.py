"""Brokers against which a suite can run: one gateway, several on one Postgres, or Apache Kafka for comparison."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from tests.compat.suites import ROOT
from tests.gateway_process import GatewayProcess
from tests.kafka.process import KafkaProcess, assemble
from tests.postgres import EMPTY, databases, short_directory

GATEWAY_FOLDERS = ("gateway", "protocol", "storage")


class BrokerProcess(Protocol):
    """The methods of a broker's process that the runner and its control interface use."""

    @property
    def log_path(self) -> Path: ...
    @property
    def bootstrap(self) -> str: ...
    @property
    def metrics_url(self) -> str | None: ...
    @property
    def running(self) -> bool: ...
    def start(self) -> None: ...
    def kill(self) -> None: ...
    def restart(self) -> None: ...
    def close(self) -> None: ...
    def log_tail(self) -> str: ...


_starting: list[BrokerProcess] = []


@contextlib.contextmanager
def starting(broker: BrokerProcess) -> Iterator[None]:
    """Let `end_starting` close the broker while this context lasts. A starting broker serves no request, and its caller
    would wait for minutes."""
    _starting.append(broker)
    try:
        yield
    finally:
        _starting.remove(broker)


def end_starting() -> None:
    """Close every broker that is starting now. If the caller starts several processes in turn, it may start the next
    one right afterwards.
    """
    for broker in tuple(_starting):
        with contextlib.suppress(AssertionError):  # A broker that does not stop in time is killed.
            broker.close()


@dataclass(frozen=True, slots=True)
class Broker:
    """A kind of broker. `process(directory, settings)` makes a broker's process, which is not started yet. Settings
    have Kafka's names.
    """

    name: str
    version: Callable[[], str]
    process: Callable[[Path, Mapping[str, str]], BrokerProcess]


def gateway_version() -> str:
    """Return the last commit that changed the gateway, with `+` if there are uncommitted changes."""
    try:
        commit = _git("log", "-1", "--abbrev=12", "--format=%h", "--", *GATEWAY_FOLDERS)
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *GATEWAY_FOLDERS)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return (commit or "unknown") + ("+" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _gateway(directory: Path, settings: Mapping[str, str]) -> BrokerProcess:
    return GatewayProcess(directory, database_url=None, settings=settings, environment={})


def _kafka(directory: Path, settings: Mapping[str, str]) -> BrokerProcess:
    assemble()
    return KafkaProcess(directory, settings=settings)


class GatewayNodes:
    """Several gateways on one Postgres. A client gets the address of the first and discovers the others.

    They share one log file. They report no metrics, because a reader would mistake one node's metrics for the
    cluster's.
    """

    metrics_url = None

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, str],
        count: int,
        own: Callable[[int], Mapping[str, str]] = lambda number: {},
    ) -> None:
        """`own` gives each node additional settings. Its keys are the nodes' numbers, from 1."""
        self._own = own
        self.log_path = directory / "gateway.log"
        self._settings, self._count = settings, count
        self._nodes: list[GatewayProcess] = []
        self._stack = contextlib.ExitStack()

    @property
    def bootstrap(self) -> str:
        return self._nodes[0].bootstrap

    @property
    def running(self) -> bool:
        return all(node.running for node in self._nodes)

    def start(self) -> None:
        """Start the nodes that do not run. If one of them fails to start, stop the nodes that this call has started."""
        try:
            if not self._nodes:
                self._make()
            for node in self._nodes:
                if not node.running:
                    node.start()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        url = self._stack.enter_context(databases()).create(EMPTY)
        for number in range(1, self._count + 1):
            settings = {**self._settings, **self._own(number)}
            directory = self._stack.enter_context(short_directory())
            node = GatewayProcess(directory, database_url=url, settings=settings, environment={})
            node.log_path = self.log_path
            self._stack.callback(node.close)
            self._nodes.append(node)

    def kill(self) -> None:
        """Kill all nodes with kill −9."""
        for node in self._nodes:
            node.kill()

    def restart(self) -> None:
        """Restart one node after the other, as a rolling upgrade does. All other nodes continue to serve."""
        for node in self._nodes:
            node.restart()

    def close(self) -> None:
        self._stack.close()

    def log_tail(self) -> str:
        return self._nodes[0].log_tail() if self._nodes else ""


SLUICE = Broker("sluice", gateway_version, _gateway)
APACHE_KAFKA = Broker("kafka", lambda: f"Apache Kafka {assemble()}", _kafka)


def sluice_nodes(count: int) -> Broker:
    return replace(SLUICE, process=lambda directory, settings: GatewayNodes(directory, settings, count))
