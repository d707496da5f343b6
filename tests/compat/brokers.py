"""What a suite can be run against: a gateway, several on one Postgres, or Apache Kafka as the measure."""

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
from tests.postgres import databases, short_directory

GATEWAY_FOLDERS = ("gateway", "protocol", "storage")


class BrokerProcess(Protocol):
    """What the runner and its control ask of a broker's process."""

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
    """While entered, `end_starting` closes it: it serves nobody yet, and whoever waits for that waits for minutes."""
    _starting.append(broker)
    try:
        yield
    finally:
        _starting.remove(broker)


def end_starting() -> None:
    """Close every broker that is starting now; a start of several processes may be at its next one right after."""
    for broker in tuple(_starting):
        with contextlib.suppress(AssertionError):  # it did not stop in its time, and has been killed
            broker.close()


@dataclass(frozen=True, slots=True)
class Broker:
    """`process(directory, settings)` makes one that is not started yet; settings have Kafka's names."""

    name: str
    version: Callable[[], str]
    process: Callable[[Path, Mapping[str, str]], BrokerProcess]


def gateway_version() -> str:
    """The commit that last changed the gateway; `+` if there are changes that are in no commit."""
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
    """So many gateways on one Postgres. A client is told of the first and finds the others by itself.

    They keep one log, and tell no metrics: those of one node would be taken for the cluster's.
    """

    metrics_url = None

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, str],
        count: int,
        own: Callable[[int], Mapping[str, str]] = lambda number: {},
    ) -> None:
        """`own`: what each has beside the settings, by its number, from 1."""
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
        """Those that do not run. What was started ends with a start that fails."""
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
        url = self._stack.enter_context(databases()).create(empty=True)
        for number in range(1, self._count + 1):
            settings = {**self._settings, **self._own(number)}
            directory = self._stack.enter_context(short_directory())
            node = GatewayProcess(directory, database_url=url, settings=settings, environment={})
            node.log_path = self.log_path
            self._stack.callback(node.close)
            self._nodes.append(node)

    def kill(self) -> None:
        """kill −9 of all of them."""
        for node in self._nodes:
            node.kill()

    def restart(self) -> None:
        """One after the other, as an upgrade does it: the others serve on."""
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
