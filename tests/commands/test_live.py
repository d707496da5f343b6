"""Commands that run until they are interrupted: `consume --group`, `describe --watch`, `history --follow`, `top`."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from threading import Thread
from typing import IO

import pytest

from gateway.cli import main
from gateway.commands.log import Bounds
from gateway.commands.top import Group, Look, group_rows, topic_rows
from tests.commands.terminal import Prompt, consume, consumer, produce
from tests.commands.terminal import sluice as sluice
from tests.commands.terminal import topic as topic
from tests.gateway_process import ROOT, GatewayFactory, GatewayProcess

TIMEOUT_S = 60


class Running:
    """A command in a process of its own, whose output is read line by line."""

    def __init__(self, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out: Queue[str] = Queue(10_000)
        self.err: Queue[str] = Queue(10_000)
        for stream, queue in ((self._process.stdout, self.out), (self._process.stderr, self.err)):
            assert stream is not None
            self._err_reader = Thread(target=self._read, args=(stream, queue), daemon=True)  # the last one
            self._err_reader.start()

    @staticmethod
    def _read(stream: IO[str], queue: Queue[str]) -> None:
        for line in stream:
            queue.put(line.rstrip("\n"))

    def until(self, pattern: str, *, queue: Queue[str] | None = None) -> str:
        """Return the first matching line from the current position on."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            line = (self.out if queue is None else queue).get(timeout=max(deadline - time.monotonic(), 0.01))
            if re.search(pattern, line):
                return line

    def write(self, line: str) -> None:
        """Write a line to the command's stdin, which stays open."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def interrupt(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(TIMEOUT_S)

    def errors(self) -> list[str]:
        """Return the unread lines of stderr once the command has ended."""
        self._err_reader.join(TIMEOUT_S)
        return list(self.err.queue)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


@contextmanager
def running(*words: str) -> Iterator[Running]:
    command = Running(*words)
    try:
        yield command
    finally:
        command.close()


@pytest.fixture
def group() -> str:
    return f"g-{uuid.uuid4().hex[:8]}"


def test_a_member_commits_exactly_what_it_printed(
    sluice: Prompt, gateway: GatewayProcess, topic: str, group: str
) -> None:
    produce(gateway, topic, 0, ["a", "b", "c", "d"])
    member = ("consume", topic, "--group", group)
    assert sluice(*member, "-n", "3") == "a\nb\nc\n"
    (row, _) = sluice.json("groups", "lag", group, "--by-partition")
    assert (row["committed"], row["lag"]) == (3, 1)
    assert sluice(*member, "-e", "-f", "%p %o %k %s\\n") == "0 3 k3 d\n"
    assert sluice(*member, "-e") == ""
    assert sluice("consume", topic, "--group", f"{group}-new", "--from", "end", "-e") == ""
    assert "leave out --partition" in sluice(*member, "-p", "0", code=1)
    assert "--from is beginning or end" in sluice(*member, "--from", "2", code=1)


def test_a_member_commits_before_its_partition_moves(
    sluice: Prompt, gateway: GatewayProcess, topic: str, group: str
) -> None:
    for partition in (0, 1):
        produce(gateway, topic, partition, [f"early-{partition}"])
    with running("consume", topic, "-g", group, "-v", "-b", gateway.bootstrap) as member:
        member.until("assigned 0-1", queue=member.err)
        assert {member.until("early"), member.until("early")} == {"early-0", "early-1"}
        with consumer(gateway, group, topic) as other:
            while not other.assignment():
                assert other.poll(0.1) is None
            member.until("revoked 0-1", queue=member.err)
            member.until("assigned [01]$", queue=member.err)
            for partition in (0, 1):
                produce(gateway, topic, partition, [f"late-{partition}"])
            own = member.until("late")
            assert {own, *consume(other, 1)} == {"late-0", "late-1"}
            other.commit(asynchronous=False)
        assert member.interrupt() == 0
    (row,) = sluice.json("groups", "lag", group)
    assert row["lag"] == 0
    (described,) = sluice.json("groups", "describe", group)
    assert described["state"] == "Empty", "the member left the group"


def test_describe_is_shown_again_until_it_is_interrupted(
    sluice: Prompt, gateway: GatewayProcess, topic: str, group: str
) -> None:
    sluice("groups", "reset-offsets", group, "--topic", topic, "--to-latest", "--execute")
    words = ("groups", "describe", group, "--watch", "0.2", "-b", gateway.bootstrap)
    with running(*words, "--json") as watching:
        assert json.loads(watching.until("group"))["lag"] == 0
        produce(gateway, topic, 0, ["a"])
        assert json.loads(watching.until('"lag": 1'))["lag"] == 1
        assert watching.interrupt() == 0
    with running(*words) as watching:
        for _ in range(2):
            watching.until("^GROUP")
            watching.until("^Partitions")
        assert watching.interrupt() == 0
    assert "there is no group" in sluice("groups", "describe", f"{group}x", "--watch", code=1)


def test_a_terminal_is_redrawn_in_place(sluice: Prompt, gateway: GatewayProcess, topic: str) -> None:
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "gateway.cli", "top", "--interval", "0.2", "-b", gateway.bootstrap]
    process = subprocess.Popen(command, cwd=ROOT, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    try:
        seen, deadline = b"", time.monotonic() + TIMEOUT_S
        while seen.count(b"\x1b[H") < 3:
            assert time.monotonic() < deadline, seen
            seen += os.read(master, 65536)
        assert b"GROUP" in seen
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
        assert b"Traceback" not in seen
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_top_shows_lag_and_rates_of_groups_and_topics(
    sluice: Prompt, gateway: GatewayProcess, topic: str, group: str
) -> None:
    sluice("groups", "reset-offsets", group, "--topic", topic, "--to-latest", "--execute")
    with running("top", group, "--interval", "0.5", "--json", "-b", gateway.bootstrap) as watching:
        first = json.loads(watching.until("{"))
        assert [(row["group"], row["lag"]) for row in first["groups"]] == [(group, 0)]
        produce(gateway, topic, 0, ["a", "b"])
        behind = json.loads(watching.until('"lag": 2'))
        (shown,) = (row for row in behind["topics"] if row["topic"] == topic)
        assert (shown["partitions"], shown["records"]) == (2, 2)
        assert watching.interrupt() == 0
    lines = sluice("top", "--once", "--interval", "0.1").splitlines()
    assert re.search(r"\d groups, lag \d+, \d+ topics", lines[0])
    assert any(line.split()[:4] == [group, "Empty", "2", "2"] for line in lines)
    assert f"there is no group {group}x; did you mean" in sluice("top", f"{group}x", "--once", code=1)


def test_rates_count_only_progress_between_two_looks() -> None:
    first, second = ("t", 0), ("t", 1)
    before = Look(10.0, {first: Bounds(0, 100)}, {"g": Group("Stable", "classic", {first: 50}, 50)})
    now = Look(
        12.0,
        {first: Bounds(0, 160), second: Bounds(0, 7)},
        {
            "g": Group("Stable", "classic", {first: 70, second: 5}, 92),
            "new": Group("Empty", "classic", {}, None),
        },
    )
    rows = {row["group"]: row for row in group_rows(before, now)}
    assert (rows["g"]["committed_per_s"], rows["g"]["lag_per_s"]) == (10.0, 21.0)
    assert (rows["new"]["committed_per_s"], rows["new"]["lag"], rows["new"]["lag_per_s"]) == (None, None, None)
    (shown,) = topic_rows(before, now)
    assert (shown["appended_per_s"], shown["records"]) == (30.0, 167)
    assert group_rows(now, Look(14.0, now.bounds, before.groups))[0]["committed_per_s"] == 0.0


def test_history_follows_the_journal_and_names_the_nearest_groups(
    sluice: Prompt, gateway: GatewayProcess, topic: str, group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gateway.database_url is not None
    words = ("groups", "history", group, "--follow", "--database-url", gateway.database_url)
    with running(*words) as following:
        with consumer(gateway, group, topic) as member:
            while not member.assignment():
                member.poll(0.1)
            following.until("tester.* joins")
            following.until("rebalance complete")
        line = following.until("leaves")
        assert re.match(r"\d{4}-\d\d-\d\dT", line)
        assert following.interrupt() == 0
    capsys.readouterr()
    assert main(["groups", "history", f"{group}s", "--database-url", gateway.database_url]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"sluice: the journal has no rows of group {group}s; did you mean ")
    assert group in said


def test_a_line_after_a_restart_of_the_broker_is_appended(gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory()
    assert main(["topics", "create", "orders", "-b", gateway.bootstrap]) == 0
    with running("produce", "orders", "-v", "-b", gateway.bootstrap) as command:
        command.write("before")
        command.until("0@0")
        gateway.restart()
        command.write("after")
        command.until("0@1")
        assert command.interrupt() == -signal.SIGINT
        assert command.errors() == ["sluice: interrupted; 2 records were appended before"]


def test_a_command_that_waits_for_a_broker_ends_without_a_traceback_on_ctrl_c() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        with running("topics", "list", "-b", f"{host}:{port}") as command:
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(1)
                assert command.interrupt() == -signal.SIGINT
            assert command.errors() == []
