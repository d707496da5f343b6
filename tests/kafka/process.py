"""Apache Kafka as a process beside the gateway, with the same verbs: start, stop, kill, restart.

The one idea: a test can send the same requests to Kafka and to a gateway, so it finds real differences. One node is
broker and controller. Its jars come from Maven Central once and are kept in .compat/kafka.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

from tests.gateway_process import LOG_TAIL_LINES, POLL_SECONDS, ROOT, answers, free_ports

POM = Path(__file__).parent / "pom.xml"
LOGGING = Path(__file__).parent / "log4j2.properties"
LIBRARIES = ROOT / ".compat" / "kafka" / "libs"
START_SECONDS = 90.0
STOP_SECONDS = 60.0
ASSEMBLE_SECONDS = 900.0
TOOL_SECONDS = 60.0
_JVM = ("-Xmx1g", "-Xms1g", "-XX:+UseG1GC", f"-Dlog4j2.configurationFile={LOGGING}")
_JVM_OF_MANY = ("-Xmx384m", "-XX:+UseSerialGC", f"-Dlog4j2.configurationFile={LOGGING}")
CONTROLLER_ID = "100"

ONE_NODE: Mapping[str, str] = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "4",
    "group.coordinator.rebalance.protocols": "classic,consumer,streams,share",
}
SYNCED: Mapping[str, str] = {"log.flush.interval.messages": "1"}
"""Settings with which every batch is on disk before it is acknowledged, as with a gateway. By default Kafka leaves
batches in the page cache.
"""


def assemble(pom: Path = POM, libraries: Path = LIBRARIES) -> str:
    """Fetch the jars that a pom names if they are missing, and return the pom's version of Kafka. This needs mvn. Raise
    CalledProcessError if it fails.
    """
    complete = libraries.parent / "complete"
    wanted = pom.read_text()
    if not complete.exists() or complete.read_text() != wanted:
        libraries.mkdir(parents=True, exist_ok=True)
        for jar in libraries.glob("*.jar"):
            jar.unlink()
        subprocess.run(
            [
                *("mvn", "-B", "-q", "-f", str(pom), "dependency:copy-dependencies"),
                *("-DincludeScope=runtime", f"-DoutputDirectory={libraries}"),
            ],
            check=True,
            timeout=ASSEMBLE_SECONDS,
            stdin=subprocess.DEVNULL,
        )
        complete.write_text(wanted)
    return wanted.partition("<kafka.version>")[2].partition("<")[0]


def java(main_class: str, *arguments: str, options: Sequence[str] = (), libraries: Path = LIBRARIES) -> list[str]:
    """Return the command that runs a class from Kafka's jars. Kafka's tools are classes too."""
    return ["java", *options, "-cp", f"{libraries}/*", main_class, *arguments]


class KafkaProcess:
    """One Kafka node on a free port. `settings` override the settings of a single node.

    A cluster of several nodes has a `controller`, which serves no clients, and brokers that are `of` this controller. A
    broker gives clients the address in `advertise`, and other brokers use a listener of their own.
    """

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, str],
        role: Literal["both", "controller"] = "both",
        of: KafkaProcess | None = None,
        advertise: str = "",
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log_path = directory / "kafka.log"
        port, second_port = free_ports(2)
        self.bootstrap = f"127.0.0.1:{port}"
        second = f"127.0.0.1:{second_port}"
        if role == "controller":
            own = {
                "process.roles": "controller",
                "node.id": CONTROLLER_ID,
                "listeners": f"CONTROLLER://{self.bootstrap}",
                "controller.quorum.bootstrap.servers": self.bootstrap,
            }
        elif of is not None:
            own = {
                "process.roles": "broker",
                "listeners": f"PLAINTEXT://{self.bootstrap},INTERNAL://{second}",
                "advertised.listeners": f"PLAINTEXT://{advertise or self.bootstrap},INTERNAL://{second}",
                "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
                "inter.broker.listener.name": "INTERNAL",
                "controller.quorum.bootstrap.servers": of.bootstrap,
            }
        else:
            own = {
                "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://{second}",
                "advertised.listeners": f"PLAINTEXT://{advertise or self.bootstrap}",
                "controller.quorum.bootstrap.servers": second,
            }
        addresses = {**own, "log.dirs": str(directory / "logs")}
        self.cluster_id = ""
        self._of = of
        self._jvm = _JVM if role == "both" and of is None else _JVM_OF_MANY
        self.metrics_url = None
        self._properties = directory / "server.properties"
        lines = [f"{name}={value}" for name, value in {**ONE_NODE, **addresses, **settings}.items()]
        self._properties.write_text("\n".join(lines) + "\n")
        self._process: subprocess.Popen[bytes] | None = None
        self._formatted = False
        self._log_bytes = 0
        """Position in the log where this start's lines begin. Restarts append to the same log."""

    @property
    def pid(self) -> int:
        assert self._process is not None, "Kafka was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the node and wait until it serves. If that fails, raise AssertionError with the end of the log."""
        assert not self.running
        with self.log_path.open("ab") as log:
            if not self._formatted:
                self._format(log)
            self._log_bytes = self.log_path.stat().st_size
            self._process = subprocess.Popen(
                java("kafka.Kafka", str(self._properties), options=self._jvm),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_SECONDS
        while not (answers(self.bootstrap) and self._is_unfenced()):
            if self._process.poll() is not None:
                raise AssertionError(f"Kafka ended with {self._process.returncode}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"Kafka did not serve in {START_SECONDS:.0f} s:\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)

    def _format(self, log: IO[bytes]) -> None:
        if self._of is None:
            made = self._storage_tool("random-uuid", log=log)
            self.cluster_id, alone = made.split()[-1].decode().removesuffix("\x1b[0m"), ["--standalone"]
        else:
            self.cluster_id, alone = self._of.cluster_id, []
        arguments = ["format", *alone, "-t", self.cluster_id, "-c", str(self._properties)]
        log.write(self._storage_tool(*arguments, log=log))
        log.flush()
        self._formatted = True

    def _storage_tool(self, *arguments: str, log: IO[bytes]) -> bytes:
        """Run the storage tool and return its output. While the tool runs, it counts as this node's process, so that
        `close` can end it.
        """
        self._process = subprocess.Popen(
            java("kafka.tools.StorageTool", *arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
        )
        try:
            said, _ = self._process.communicate(timeout=TOOL_SECONDS)
        finally:
            self.close()
        assert not self._process.returncode, f"{arguments[0]} ended with {self._process.returncode}: {self.log_tail()}"
        return said

    def _is_unfenced(self) -> bool:
        """Return whether the broker is unfenced. A broker accepts connections a moment before its controller lets it
        lead partitions.
        """
        with self.log_path.open("rb") as log:
            log.seek(self._log_bytes)
            return b"Kafka Server started" in log.read()

    def stop(self) -> int:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"Kafka did not stop in {STOP_SECONDS:.0f} s:\n{self.log_tail()}") from None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        if self.running:
            self.stop()
        self.start()

    def close(self) -> None:
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
            assert self._process is not None
            self._process.wait()

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-LOG_TAIL_LINES:])
