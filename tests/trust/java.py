"""Java's clients: one process for all of a run, which takes commands and reports events (Clients.java)."""

from __future__ import annotations

import hashlib
import itertools
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.gateway_process import ROOT
from tests.kafka.process import LIBRARIES, LOGGING, assemble
from tests.trust.patience import CALL_S

SOURCE = Path(__file__).with_name("Clients.java")
CLASSES = ROOT / ".compat" / "trust"
COMPILE_S = 300.0
JVM = ("-Xmx384m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", f"-Dlog4j2.configurationFile={LOGGING}")

OnEvent = Callable[[Sequence[str]], None]
"""Receives the words of an event: its name, the client's id, and its values."""


def missing() -> str | None:
    """Return why Java's clients cannot run here."""
    absent = [program for program in ("java", "javac") if shutil.which(program) is None]
    if not any(LIBRARIES.glob("kafka-clients-*.jar")) and shutil.which("mvn") is None:
        absent.append("mvn")
    return f"{' and '.join(absent)} not installed" if absent else None


def build() -> Path:
    """Compile the clients if their source has changed, and return the directory of the classes."""
    assemble()
    built = CLASSES / hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    if not (built / "complete").exists():
        command = ["javac", "-cp", f"{LIBRARIES}/*", "-d", str(built), str(SOURCE)]
        subprocess.run(command, check=True, timeout=COMPILE_S, stdin=subprocess.DEVNULL)
        (built / "complete").touch()
    return built


class Java:
    """The process. Any thread may start clients and send commands."""

    def __init__(self, bootstrap: str) -> None:
        self._ids = itertools.count(1)
        self._listeners: dict[str, OnEvent] = {}
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            ["java", *JVM, "-cp", f"{build()}:{LIBRARIES}/*", "Clients", bootstrap],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, name="java", daemon=True)
        self._reader.start()

    def start(self, kind: str, *words: object, on_event: OnEvent) -> JavaClient:
        """Start a client, whose events `on_event` receives on the reader's thread."""
        client = JavaClient(self, str(next(self._ids)))
        self._listeners[client.id] = lambda event: client.heard(event, on_event)
        self.command(kind, client.id, *words)
        return client

    def command(self, *words: object) -> None:
        assert self._process.stdin is not None
        line = "\t".join(str(word) for word in words)
        with self._lock:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.rstrip("\n").split("\t")
            # A warning of the logger is no event.
            listener = self._listeners.get(words[1]) if len(words) > 1 else None
            if listener is not None:
                listener(words)
        for listener in list(self._listeners.values()):
            listener(("ended", "", "the virtual machine has ended"))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(CALL_S)


class JavaClient:
    """One client in the process: a producer, a member or a transactional worker."""

    def __init__(self, java: Java, name: str) -> None:
        self.id = name
        self.error = ""
        """Description of what ended the client; empty if it was stopped."""
        self._java = java
        self._ended = threading.Event()

    def heard(self, event: Sequence[str], on_event: OnEvent) -> None:
        if event[0] == "ended":
            self.error = event[2]
            self._ended.set()
        else:
            on_event(event)

    def command(self, name: str, *words: object) -> None:
        self._java.command(name, self.id, *words)

    def stop(self) -> None:
        if not self.ended:
            self.command("stop")

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until the client has ended; return whether it has."""
        return self._ended.wait(seconds)
