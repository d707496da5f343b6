"""A measured server as other processes see it: its start in a fresh directory, its process and its CPU time."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.compat.brokers import BrokerProcess
from tests.gateway_process import GatewayProcess, find_coordinator


@contextlib.contextmanager
def fresh_directory(prefix: str) -> Iterator[Path]:
    """A directory on the disk that SLUICE_BENCH_DIR names, removed at the end."""
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=os.environ.get("SLUICE_BENCH_DIR")))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def running_gateway(
    change: Callable[[GatewayProcess], GatewayProcess] = lambda gateway: gateway,
) -> Iterator[GatewayProcess]:
    """A gateway with an embedded Postgres and zero initial rebalance delay, in a fresh directory. `change`
    may change the gateway before it starts.
    """
    settings = {"group.initial.rebalance.delay.ms": "0"}
    with fresh_directory("sluice-bench-") as directory:
        gateway = change(GatewayProcess(directory, database_url=None, settings=settings, environment={}))
        try:
            gateway.start()
            find_coordinator(gateway.bootstrap)
            yield gateway
        finally:
            gateway.close()


def cpu_s(broker: BrokerProcess) -> float:
    """Return the CPU seconds of the server and all its children, including those that have ended."""
    process = psutil.Process(pid_of(broker))
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def pid_of(broker: BrokerProcess) -> int:
    port = int(broker.bootstrap.rpartition(":")[2])
    for process in psutil.Process().children(recursive=True):
        try:
            listening = any(
                connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
                for connection in process.net_connections("tcp")
            )
        except psutil.Error:
            continue
        if listening:
            return process.pid
    raise RuntimeError(f"nothing listens at {broker.bootstrap}")
