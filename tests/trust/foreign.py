"""Clients of other languages: one process for all clients of a language, which takes commands and reports events.

Clients.java and franz_go/main.go speak the same lines; `java.py` and `franz.py` build and start them.
"""

from __future__ import annotations

import itertools
import subprocess
import threading
from collections.abc import Callable, Sequence

from tests.trust.patience import CALL_S

OnEvent = Callable[[Sequence[str]], None]
"""Receives an event as a list of words: the event's name, the client's id, and its values."""


class ForeignProcess:
    """The process of one language's clients. Any thread may start clients and send commands."""

    def __init__(self, command: Sequence[str]) -> None:
        self._ids = itertools.count(1)
        self._listeners: dict[str, OnEvent] = {}
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, name="foreign clients", daemon=True)
        self._reader.start()

    def start(self, kind: str, *words: object, on_event: OnEvent) -> ForeignClient:
        """Start a client. The thread that reads the process's output calls `on_event` with its events."""
        client = ForeignClient(self, str(next(self._ids)))
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
            # The clients' logger may print a warning, which is not an event.
            listener = self._listeners.get(words[1]) if len(words) > 1 else None
            if listener is not None:
                listener(words)
        for listener in list(self._listeners.values()):
            listener(("ended", "", "the process has ended"))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(CALL_S)


class ForeignClient:
    """One client in the process: a producer, a member or a transactional worker."""

    def __init__(self, process: ForeignProcess, name: str) -> None:
        self.id = name
        self.error = ""
        """Description of what ended the client; empty if it was stopped."""
        self._process = process
        self._ended = threading.Event()

    def heard(self, event: Sequence[str], on_event: OnEvent) -> None:
        if event[0] == "ended":
            self.error = event[2]
            self._ended.set()
        else:
            on_event(event)

    def command(self, name: str, *words: object) -> None:
        self._process.command(name, self.id, *words)

    def stop(self) -> None:
        if not self.ended:
            self.command("stop")

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until the client has ended, and return True if it has."""
        return self._ended.wait(seconds)
