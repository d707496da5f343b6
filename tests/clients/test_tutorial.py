"""The tutorial of the documentation. The test executes its blocks one after another."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import asyncpg

from tests.gateway_process import ROOT, GatewayFactory
from tests.steps.waiting import wait_for

DEADLINE_S = 60.0
NOT_RUN = ("make run", ". .venv/bin/activate", "pip install", "psql -h")
"""Blocks that the test replaces: those that start the node, the environment, the client and a session of Postgres."""


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs/tutorial.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run(block: str, directory: Path, environment: Mapping[str, str]) -> str:
    ended = subprocess.run(
        ["bash", "-euc", block], cwd=directory, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ended.returncode == 0, f"{block}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


class Member:
    """The tutorial's program in a process of its own."""

    def __init__(self, directory: Path, number: int, environment: Mapping[str, str]) -> None:
        self._output = directory / f"member-{number}.txt"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "member.py"], cwd=directory, env=environment, stdout=output, stderr=output
            )

    def assigned(self) -> set[int]:
        """Return the partitions of the newest assignment."""
        lines = re.findall(r"^assigned \[(.*)\]$", self._output.read_text(), re.MULTILINE)
        return {int(number) for number in lines[-1].split(",") if number.strip()} if lines else set()


def wait_until(members: list[Member], shares: list[int]) -> None:
    """Wait until the members own all four partitions. `shares` holds how many partitions each member must own."""
    wait_for(
        lambda: [member.assigned() for member in members],
        f"all four partitions are owned in shares of {shares}",
        holds=lambda owned: sorted(map(len, owned)) == shares and set[int]().union(*owned) == {0, 1, 2, 3},
        seconds=DEADLINE_S,
    )


async def test_tutorial_works_block_by_block(
    gateway_factory: GatewayFactory, database_url: str, tmp_path: Path
) -> None:
    gateway = gateway_factory({"group.connection.grace.ms": "500"}, database_url=database_url)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLUICE_BOOTSTRAP": gateway.bootstrap,
        "SLUICE_DATABASE_URL": database_url,
    }
    create, consume, start, describe, history, consume_order = (
        block for block in blocks("sh") if not block.startswith(NOT_RUN)
    )
    await asyncio.to_thread(run, create, tmp_path, environment)
    read = await asyncio.to_thread(run, consume, tmp_path, environment)
    assert sorted(map(int, read.split())) == list(range(1, 101))

    (program,) = blocks("python")
    assert start == "python member.py\n"
    (tmp_path / "member.py").write_text(program.replace("127.0.0.1:9092", gateway.bootstrap))
    members = [Member(tmp_path, number, environment) for number in range(2)]
    try:
        await asyncio.to_thread(wait_until, members, [2, 2])
        assert (await asyncio.to_thread(run, describe, tmp_path, environment)).count("rdkafka") >= 2
        members[0].process.send_signal(signal.SIGKILL)
        members[0].process.wait()
        await asyncio.to_thread(wait_until, members[1:], [4])
        told = await asyncio.to_thread(run, history, tmp_path, environment)
        assert "lost" in told, told
    finally:
        for member in members:
            member.process.kill()
            member.process.wait()

    (statements,) = blocks("sql")
    session = await asyncpg.connect(database_url)
    for statement in statements.strip().split(";\n"):
        await session.execute(statement)
    await session.close()
    assert '"total": 99.90' in await asyncio.to_thread(run, consume_order, tmp_path, environment)
