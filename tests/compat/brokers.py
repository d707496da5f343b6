"""What a suite can be run against: a gateway, or Apache Kafka as the measure."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.compat.suites import ROOT
from tests.gateway_process import GatewayProcess
from tests.kafka.process import KafkaProcess, assemble

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


SLUICE = Broker("sluice", gateway_version, _gateway)
APACHE_KAFKA = Broker("kafka", lambda: f"Apache Kafka {assemble()}", _kafka)
