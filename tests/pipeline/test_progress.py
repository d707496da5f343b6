"""A working job prints something every few seconds, from its start on."""

from __future__ import annotations

import argparse
import io
import json
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import cli
from pipeline.progress import SAY_SECONDS, Heartbeat, Progress, Stop

ENOUGH_SECONDS = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def said(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_the_first_line_comes_within_five_seconds_and_another_after_each_silence() -> None:
    clock, stream = Clock(), io.StringIO()
    lines = Progress("verify", as_json=True, stream=stream, now=clock)
    for tenth in range(1, 200):
        clock.now = 1_000.0 + tenth / 10
        if tenth == 100:
            lines.say("compares")
        lines.beat()
    told = [(line["seconds"], line["say"]) for line in said(stream)]
    assert told == [(4.0, "still: prepares"), (8.0, "still: prepares"), (10.0, "compares"), (14.0, "still: compares"),
                    (18.0, "still: compares")]  # fmt: skip
    assert SAY_SECONDS < 5


def test_a_heartbeat_says_what_a_step_counts() -> None:
    clock, stream = Clock(), io.StringIO()
    lines = Progress("verify", as_json=True, stream=stream, now=clock)
    lines.watch(lambda: ("3 of 8 tasks are done", {"event": "tasks", "done": 3}))
    clock.now += SAY_SECONDS
    lines.beat()
    lines.watch(None)
    clock.now += SAY_SECONDS
    lines.beat()
    assert [(line["say"], line.get("done")) for line in said(stream)] == [
        ("3 of 8 tasks are done", 3),
        ("still: prepares", None),
    ]


class Heard(io.StringIO):
    """A stream that reports when something is printed."""

    def __init__(self) -> None:
        super().__init__()
        self.printed = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        self.printed.set()
        return written


@pytest.mark.parametrize("name", sorted(cli.JOBS))
def test_a_job_that_says_nothing_of_its_own_is_heard_while_it_works(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, ended = Heard(), threading.Event()

    def run(arguments: argparse.Namespace, lines: Progress, stop: Stop) -> int:
        assert stream.printed.wait(ENOUGH_SECONDS)
        ended.set()
        return 0

    monkeypatch.setattr("pipeline.progress.SAY_SECONDS", 0.0)
    monkeypatch.setattr("pipeline.progress.LOOK_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(Stop, "listen", lambda self: None)
    monkeypatch.setattr(cli, "_load", lambda job: SimpleNamespace(add_arguments=lambda parser: None, run=run))
    assert cli.main([name]) == 0
    assert ended.is_set()
    assert stream.getvalue().startswith(f"{name} 0:00 still: prepares\n")


class Waiting(Stop):
    """A stop request that records when its job waits for it."""

    def __init__(self) -> None:
        self.looked = threading.Event()
        super().__init__()

    @property
    def waiting(self) -> bool:
        self.looked.set()
        return True

    @waiting.setter
    def waiting(self, value: bool) -> None:
        """Ignore the end of a wait."""


def test_a_job_that_waits_for_its_next_batch_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, stop = io.StringIO(), Waiting()
    lines = Progress("archive", stream=stream, now=Clock())
    monkeypatch.setattr("pipeline.progress.SAY_SECONDS", 0.0)
    with Heartbeat(lines, stop):
        assert stop.looked.wait(ENOUGH_SECONDS)
    assert stream.getvalue() == ""


def test_a_stop_says_when_a_job_waits_for_it() -> None:
    stop, seen = Stop(), threading.Event()

    def wait() -> None:
        stop.wait(ENOUGH_SECONDS)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not stop.waiting and waiter.is_alive():
        seen.wait(0.01)
    assert waiter.is_alive()
    stop.ask()
    waiter.join(ENOUGH_SECONDS)
    assert not stop.waiting
