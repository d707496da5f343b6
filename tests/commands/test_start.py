"""Modules that a command loads before its first answer. It must load only those that it uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gateway_process import GatewayProcess

COMMANDS: list[tuple[tuple[str, ...], set[str]]] = [
    (("topics", "list"), set()),
    (("topics", "create", "started-{pid}"), {"create_topics"}),
    (("groups", "list"), {"list_groups"}),
    (("configs", "describe", "broker"), {"describe_configs"}),
    (("transactions", "list"), {"list_transactions", "describe_transactions"}),
    (("cluster", "info"), {"describe_cluster"}),
    (("users", "list"), {"alter_user_scram_credentials", "describe_user_scram_credentials"}),
]
"""Commands, each with the message declarations that it loads in addition to those that every command loads."""

EVERY_COMMAND = {"api_versions", "metadata"}
NEEDLESS = {"aiohttp", "aiokafka", "asyncio", "asyncpg", "rich", "storage", "structlog", "uvloop"}
MOST_CPU_S = 0.4
"""A command takes 0.12 s of CPU on an idle core. A core that it shares with another thread is up to twice as slow."""

_PROGRAM = """
import resource, sys
from gateway.cli import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, *sys.modules, file=sys.stderr)
sys.exit(code)
"""


NEEDLESS_FOR_HISTORY = {
    *("aiohttp", "aiokafka", "construct", "rich", "structlog", "uvloop"),
    *("gateway.commands.client", "gateway.commands.groups", "protocol.codec", "protocol.messages"),
    *("storage.embedded", "storage.types"),
}
"""`groups history` reads Postgres: it needs asyncio, the driver and the journal, but no Kafka client."""


class Run(NamedTuple):
    cpu_s: float
    modules: set[str]


def run(gateway: GatewayProcess, *words: str) -> Run:
    """Run a command that connects to the gateway."""
    return run_program(*(word.format(pid=os.getpid()) for word in words), "-b", gateway.bootstrap)


def run_program(*words: str, code: int = 0) -> Run:
    command = [sys.executable, "-c", _PROGRAM, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    cpu_s, *modules = done.stderr.splitlines()[-1].split()
    return Run(float(cpu_s), set(modules))


@pytest.mark.parametrize(("words", "messages"), COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS])
def test_a_command_loads_only_the_messages_that_it_uses(
    gateway: GatewayProcess, words: tuple[str, ...], messages: set[str]
) -> None:
    modules = run(gateway, *words).modules
    room = "protocol.messages."
    assert {name.removeprefix(room) for name in modules if name.startswith(room)} == messages | EVERY_COMMAND
    assert not {name.partition(".")[0] for name in modules} & NEEDLESS


def test_groups_history_loads_no_client_and_nothing_that_starts_postgres(tmp_path: Path) -> None:
    modules = run_program("groups", "history", "nothing", "--data-dir", str(tmp_path), code=1).modules
    assert "storage.journal" in modules
    assert not modules & NEEDLESS_FOR_HISTORY


def test_users_of_a_broker_are_listed_without_the_settings_of_a_node(gateway: GatewayProcess) -> None:
    assert "gateway.config.settings" not in run(gateway, "users", "list").modules


def test_a_command_that_asks_a_broker_starts_soon(gateway: GatewayProcess) -> None:
    assert min(run(gateway, "topics", "list").cpu_s for _ in range(5)) < MOST_CPU_S
