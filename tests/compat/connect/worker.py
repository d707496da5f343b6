"""A Kafka Connect worker in its own JVM, used as a user does: by a properties file, connectors, and REST."""

from __future__ import annotations

import json
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.gateway_process import free_ports

LIMIT_SECONDS = 60.0
POLL_SECONDS = 0.1
LOG_TAIL_CHARACTERS = 400

_STRINGS = "org.apache.kafka.connect.storage.StringConverter"


class Worker:
    """`kind` is Standalone or Distributed. This class adds the settings that every worker needs to `settings`."""

    def __init__(
        self, libraries: Path, directory: Path, kind: str, bootstrap: str, settings: Mapping[str, str]
    ) -> None:
        (self._port,) = free_ports(1)
        self._name = f"{kind.lower()}-{self._port}"
        self._log = directory / f"{self._name}.log"
        self._properties = directory / f"{self._name}.properties"
        write_properties(
            self._properties,
            {
                "bootstrap.servers": bootstrap,
                "listeners": f"http://127.0.0.1:{self._port}",
                "key.converter": _STRINGS,
                "value.converter": _STRINGS,
                "offset.flush.interval.ms": "500",
                "plugin.discovery": "only_scan",
                "consumer.auto.offset.reset": "earliest",
                "consumer.metadata.max.age.ms": "1000",
                **settings,
            },
        )
        self._command = [
            *("java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx384m", "-cp", f"{libraries}/*"),
            *(f"org.apache.kafka.connect.cli.Connect{kind}", str(self._properties)),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *connectors: Path) -> None:
        """Start the worker and wait until REST answers. Standalone workers receive their connectors here."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, *map(str, connectors)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        eventually(self._serves, lambda: f"the worker does not serve{self.log_tail()}")

    def _serves(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the worker ended with {self._process.returncode}{self.log_tail()}"
        try:
            self.ask("/connectors")
        except (OSError, AssertionError):
            return False
        return True

    def ask(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """Send GET, or PUT if there is a body. If the worker refuses, raise AssertionError with its message."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method="GET" if body is None else "PUT",
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode()}") from error
        except TimeoutError as error:
            raise AssertionError(f"{path}: no answer in {LIMIT_SECONDS:.0f} s{self.log_tail()}") from error

    def accepts(self, path: str, body: Mapping[str, object]) -> bool:
        try:
            self.ask(path, body)
        except AssertionError:
            return False
        return True

    @property
    def address(self) -> str:
        """Address by which other workers reach this worker."""
        return f"127.0.0.1:{self._port}"

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"the worker did not stop{self.log_tail()}") from None

    def log_tail(self) -> str:
        """Return the last error of the worker's log, for the end of a sentence."""
        lines = self._log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "ERROR" in line or line.startswith(("Caused by", "org.apache.kafka"))]
        return ": " + " | ".join(errors or lines[-3:])[-LOG_TAIL_CHARACTERS:]


def write_properties(path: Path, properties: Mapping[str, str]) -> Path:
    path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    return path


def eventually(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what()}, after {LIMIT_SECONDS:.0f} s"
        time.sleep(POLL_SECONDS)
