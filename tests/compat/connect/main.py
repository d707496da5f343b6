"""Kafka Connect against the broker of COMPAT_BOOTSTRAP: a file into a topic and the topic into a file.

Scenarios are JSON lines on stdout. The one idea: the output file shows whether the workers are correct. It must contain
each input line exactly once, also after restarts of the workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.cimpl import NewTopic

from tests.compat.connect.worker import LIMIT_SECONDS, Worker, eventually, write_properties

LINES = 200
PARTITIONS = 3
READ_SECONDS = 1.0
_SESSION = {"session.timeout.ms": "6000", "heartbeat.interval.ms": "1000", "scheduled.rebalance.max.delay.ms": "1000"}


class Scene:
    """One scenario: names of its own, an input file and an output file."""

    def __init__(self, libraries: Path, directory: Path, ending: contextlib.ExitStack) -> None:
        self.bootstrap = os.environ["COMPAT_BOOTSTRAP"]
        self.name = f"connect-{uuid.uuid4().hex[:12]}"
        self.came = directory / "out.txt"
        self._went = directory / "in.txt"
        self._went.touch()
        self._sent: list[str] = []
        self._ended = 0
        self._libraries, self._directory, self._ending = libraries, directory, ending
        self._admin: Any = AdminClient({"bootstrap.servers": self.bootstrap})
        self._admin.create_topics([NewTopic(self.name, PARTITIONS, 1)])[self.name].result()

    def worker(self, kind: str, **more: str) -> Worker:
        settings = {name.replace("_", "."): value for name, value in more.items()}
        made = Worker(self._libraries, self._directory, kind, self.bootstrap, settings)
        self._ending.callback(made.stop, signal.SIGKILL)
        return made

    def distributed(self, **more: str) -> Worker:
        topics = {f"{kind}_storage_topic": f"{self.name}-{kind}" for kind in ("config", "offset", "status")}
        factors = {f"{kind}_storage_replication_factor": "1" for kind in ("config", "offset", "status")}
        session = {name.replace(".", "_"): value for name, value in _SESSION.items()}
        partitions = {"offset_storage_partitions": "5", "status_storage_partitions": "3"}
        return self.worker("Distributed", group_id=self.name, **topics, **factors, **partitions, **session, **more)

    def standalone(self) -> Worker:
        return self.worker("Standalone", offset_storage_file_filename=str(self._directory / "offsets"))

    def connectors(self) -> dict[str, dict[str, str]]:
        package = "org.apache.kafka.connect.file.FileStream"
        source = {"connector.class": f"{package}SourceConnector", "file": str(self._went), "topic": self.name}
        sink = {"connector.class": f"{package}SinkConnector", "file": str(self.came), "topics": self.name}
        return {f"{self.name}-source": source, f"{self.name}-sink": {**sink, "tasks.max": "1"}}

    def files(self) -> list[Path]:
        """Return the configuration files of the connectors for a standalone worker."""
        return [
            write_properties(self._directory / f"{name}.properties", {"name": name, **config})
            for name, config in self.connectors().items()
        ]

    def put_connectors(self, worker: Worker) -> None:
        """Create the connectors. Try again after an error, because a worker that has just joined may not know its
        leader yet.
        """
        for name, config in self.connectors().items():
            eventually(
                lambda name=name, config=config: worker.accepts(f"/connectors/{name}/config", config),
                lambda: f"the connector is refused{worker.log_tail()}",
            )

    def write(self) -> None:
        """Write more lines into the input file."""
        lines = [f"line {len(self._sent) + number}" for number in range(LINES)]
        self._sent += lines
        with self._went.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def await_lines(self, workers: list[Worker]) -> None:
        """Wait until the output file has all lines. Each line must be there once."""

        def lines() -> list[str]:
            return self.came.read_text().splitlines() if self.came.exists() else []

        eventually(
            lambda: len(lines()) >= len(self._sent),
            lambda: f"{len(lines())} of {len(self._sent)} lines came{workers[0].log_tail()}",
        )
        twice = len(lines()) - len(set(lines()))
        assert sorted(lines()) == sorted(self._sent), f"{len(lines())} lines came of {len(self._sent)}, {twice} twice"

    def await_any(self) -> None:
        """Wait until the topic contains one of the last lines, committed or not."""
        before, written = self._ended, len(self._sent)
        eventually(lambda: self._ends() > before, lambda: f"none of {written} lines was read")
        self._ended = self._ends()

    def _ends(self) -> int:
        partitions = [TopicPartition(self.name, partition) for partition in range(PARTITIONS)]
        asked = self._admin.list_offsets(dict.fromkeys(partitions, OffsetSpec.latest()))
        return sum(found.result().offset for found in asked.values())

    def await_records(self, worker: Worker) -> None:
        """Wait until the topic contains all lines, committed. Each line must be there once."""
        found: list[str] = []
        consumer = Consumer(
            {"bootstrap.servers": self.bootstrap, "group.id": "none", "isolation.level": "read_committed"}
        )
        consumer.assign([TopicPartition(self.name, partition, OFFSET_BEGINNING) for partition in range(PARTITIONS)])

        def read() -> bool:
            while message := consumer.poll(READ_SECONDS):
                found.append((message.value() or b"").decode())
            return len(found) >= len(self._sent)

        eventually(read, lambda: f"{len(found)} of {len(self._sent)} lines are committed{worker.log_tail()}")
        consumer.close()
        twice = len(found) - len(set(found))
        assert sorted(found) == sorted(self._sent), f"{len(found)} lines of {len(self._sent)}, {twice} twice"

    def cleanup_policy(self, topic: str) -> str:
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        return self._admin.describe_configs([resource])[resource].result()["cleanup.policy"].value


def standalone(scene: Scene) -> None:
    worker = scene.standalone()
    worker.start(*scene.files())
    for _ in range(2):
        scene.write()
        scene.await_lines([worker])
        worker.stop()
        scene.write()
        worker.start(*scene.files())
        scene.await_lines([worker])


def distributed(scene: Scene) -> None:
    worker = scene.distributed()
    worker.start()
    scene.put_connectors(worker)
    # A worker lists its (zero) connectors before it has created its topics, and accepts a connector only afterwards.
    for kind in ("config", "offset", "status"):
        policy = scene.cleanup_policy(f"{scene.name}-{kind}")
        assert policy == "compact", f"cleanup.policy of the {kind} topic is {policy}"
    scene.write()
    scene.await_lines([worker])
    worker.stop()
    scene.write()
    # Connectors, offsets and all other state are read from the internal topics.
    worker.start()
    scene.await_lines([worker])


def two_workers(scene: Scene) -> None:
    """Two workers share connectors and tasks. One of them stops in order, and the other one
    continues with all tasks.
    """
    first, second = scene.distributed(), scene.distributed()
    first.start()
    second.start()
    scene.put_connectors(first)

    def owners() -> set[str]:
        found: set[str] = set()
        for name in scene.connectors():
            try:
                status = first.ask(f"/connectors/{name}/status")
            except AssertionError:
                return set()
            running = [part for part in [status["connector"], *status["tasks"]] if part["state"] == "RUNNING"]
            found |= {part["worker_id"] for part in running}
        return found

    eventually(lambda: len(owners()) == 2, lambda: f"work is with {owners()}{first.log_tail()}")
    scene.write()
    scene.await_lines([first, second])
    second.stop()
    scene.write()
    scene.await_lines([first])
    eventually(lambda: owners() == {first.address}, lambda: f"work is with {owners()}{first.log_tail()}")


def gateway_restart(scene: Scene) -> None:
    worker = scene.distributed()
    worker.start()
    scene.put_connectors(worker)
    scene.write()
    scene.await_lines([worker])
    request = urllib.request.Request(os.environ["COMPAT_CONTROL"] + "/restart", method="POST", data=b"")
    with urllib.request.urlopen(request, timeout=LIMIT_SECONDS):
        pass
    scene.write()
    scene.await_lines([worker])


def exactly_once_source(scene: Scene) -> None:
    """A source writes its records and its offsets in one transaction."""
    worker = scene.distributed(exactly_once_source_support="enabled")
    worker.start()
    scene.put_connectors(worker)
    scene.write()
    scene.await_lines([worker])


def exactly_once_source_crash(scene: Scene) -> None:
    """The worker is killed (−9) while it reads. It continues at the end of its last committed transaction."""
    worker = scene.distributed(exactly_once_source_support="enabled", offset_flush_interval_ms="1000")
    worker.start()
    scene.put_connectors(worker)
    for _ in range(2):
        scene.write()
        scene.await_any()
        scene.write()
        worker.stop(signal.SIGKILL)
        worker.start()
    scene.write()
    scene.await_records(worker)


SCENARIOS: dict[str, Callable[[Scene], None]] = {
    "connect.standalone": standalone,
    "connect.distributed": distributed,
    "connect.distributed-two-workers": two_workers,
    "connect.gateway-restart": gateway_restart,
    "connect.exactly-once-source": exactly_once_source,
    "connect.exactly-once-source-crash": exactly_once_source_crash,
}


def answer(name: str, libraries: Path) -> dict[str, object]:
    started = time.monotonic()
    outcome, detail = "passed", ""
    with tempfile.TemporaryDirectory(prefix="connect-") as directory, contextlib.ExitStack() as ending:
        try:
            SCENARIOS[name](Scene(libraries, Path(directory), ending))
        except Exception as error:
            outcome, detail = "failed", str(error) or type(error).__name__
    return {"scenario": name, "outcome": outcome, "seconds": time.monotonic() - started, "detail": detail[:600]}


def main() -> None:
    libraries = Path(sys.argv[1])
    if "--version" in sys.argv:
        (runtime,) = libraries.glob("connect-runtime-*.jar")
        print(runtime.stem.removeprefix("connect-runtime-"))
        return
    named = [name for name in os.environ.get("COMPAT_SCENARIOS", "").split(",") if name] or list(SCENARIOS)
    for name in named:
        if name in SCENARIOS:
            print(json.dumps(answer(name, libraries)), flush=True)


if __name__ == "__main__":
    main()
