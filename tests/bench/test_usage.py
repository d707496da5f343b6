"""The report of a machine's time adds up, including threads and processes that end in between."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bench.usage import Machine, ProcessUsage, Snapshot, Usage, between, group_of, snapshot

AT_REST = Machine(0, 0, 0, 0, 0, 0, 0, 0, 0)
SPUN_S = 0.3


def spin() -> None:
    ends = time.thread_time() + SPUN_S
    while time.thread_time() < ends:
        pass


def test_thread_or_child_that_ends_in_between_is_counted(tmp_path: Path) -> None:
    first = snapshot({"client": os.getpid()}, tmp_path)
    thread = threading.Thread(target=spin)
    thread.start()
    thread.join()
    code = f"import time\nwhile time.process_time() < {SPUN_S}: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    spent = between(first, snapshot({"client": os.getpid()}, tmp_path))
    assert 2 * SPUN_S * 0.9 <= spent.groups["client: Python"].cpu_s <= 2 * SPUN_S + 1
    assert spent.machine.user_s + spent.machine.system_s >= 0.9 * spent.known_s


def test_ended_threads_count_as_the_rest_of_their_process() -> None:
    before = ProcessUsage({1: ("a", Usage(1, 0, 5)), 2: ("b", Usage(2, 0))}, Usage(3, 0), Usage(0, 0), "ended")
    after = ProcessUsage({1: ("a", Usage(1.5, 0, 8)), 3: ("b", Usage(0.25, 0))}, Usage(5, 1), Usage(0.5, 0), "ended")
    spent = between(Snapshot(10, AT_REST, {7: before}), Snapshot(12, AT_REST, {7: after}))
    assert spent.groups["a"] == Usage(0.5, 0, 3)
    assert spent.groups["b"].user_s == 0.25
    # The thread that ended had used 2 seconds, which are part of both sums of its process. It used more CPU time before
    # it ended.
    assert spent.groups["ended"].user_s == pytest.approx(2 - 0.75 + 0.5)
    assert spent.groups["ended"].system_s == 1


@pytest.mark.parametrize(
    ("role", "title", "name", "is_first", "group"),
    [
        ("gateway", "python -m gateway.cli serve", "python", True, "gateway: event loop"),
        ("gateway", "python -m gateway.cli serve", "python", False, "gateway: other threads"),
        ("gateway", "postgres: walwriter", "postgres", True, "Postgres: walwriter"),
        ("gateway", "postgres: io worker 1", "postgres", True, "Postgres: io worker"),
        ("gateway", "postgres: sluice postgres [local] idle", "postgres", True, "Postgres: backends"),
        ("gateway", "/x/pginstall18/bin/postgres -D /y", "postgres", True, "Postgres: postmaster"),
        ("client", "python", "rdk:broker1", False, "client: librdkafka"),
        ("kafka", "java kafka.Kafka", "C2 CompilerThre", False, "Kafka: JVM compiler"),
        ("kafka", "java kafka.Kafka", "data-plane-kafk", False, "Kafka: network and request threads"),
    ],
)
def test_thread_is_put_into_its_group(role: str, title: str, name: str, is_first: bool, group: str) -> None:
    root = not title.startswith("postgres") and "/postgres" not in title
    assert group_of(role, title, name, is_root=root, is_first=is_first) == group
