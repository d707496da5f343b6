"""The process of a test server, and the socket by which a test controls it.

The one idea: the server inherits the control socket, which has no name. The server ends when the socket closes, and the
socket also closes if this process is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

START_SECONDS = 60.0
STOP_SECONDS = 15.0
ACTION_SECONDS = 60.0
MAX_LINE_BYTES = 1024 * 1024
LOG_TAIL_LINES = 20
_PARENT = Path(__file__).parents[2]
"""Directory that holds the package `sluice`."""


class KafkaTestError(Exception):
    """The test server cannot start, or refuses an action. The message says why."""


class Kafka:
    """One test server. Used as a context manager, or by `start` and `stop`. Threads may share it."""

    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        postgres_bin: str | os.PathLike[str] | None = None,
        start_timeout: float = START_SECONDS,
    ) -> None:
        """Prepare a server.

        `settings` are broker settings by Kafka's names. `postgres_bin` is the directory of the Postgres programs to
        use instead of those of sluice-kafka[embedded]. `start_timeout` is in seconds.
        """
        self._settings = dict(settings or {})
        self._postgres_bin = postgres_bin
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._received = b""
        self._log: IO[bytes] | None = None
        self._turn = threading.Lock()
        self._numbers = itertools.count(1)
        self._actions = itertools.count(1)
        self._bootstrap = ""

    def __enter__(self) -> Kafka:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- the process ----------------------------------------------------------------------------------------------

    @property
    def bootstrap(self) -> str:
        """HOST:PORT, in the form that clients take for `bootstrap.servers`."""
        if not self._bootstrap:
            raise KafkaTestError("the test server has not been started: use `with Kafka() as kafka`")
        return self._bootstrap

    @property
    def pid(self) -> int | None:
        """Process id of the server while it runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server and return once it serves. Raise KafkaTestError with the reason if it cannot."""
        if self._process is not None:
            raise KafkaTestError("the test server runs already")
        if sys.platform == "win32":
            raise KafkaTestError("a test server needs Linux or macOS: use WSL 2 or the container image")
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "sluice", "test-server", f"--control-fd={theirs.fileno()}"]
        command += [f"--set={name}={value}" for name, value in self._settings.items()]
        command += [] if self._postgres_bin is None else [f"--postgres-bin={os.fspath(self._postgres_bin)}"]
        # A gateway's settings in the environment are not meant for the test server.
        environment = {name: text for name, text in os.environ.items() if not name.startswith("SLUICE_")}
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(_PARENT), *([others] if others else [])])
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by stop)
        try:
            self._process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # Ctrl-C is meant for the tests. The server ends when they have ended.
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise KafkaTestError(f"cannot run {sys.executable}: {error}") from error
        finally:
            theirs.close()
        self._control = ours
        try:
            started = self._receive(self._start_timeout)
            if "error" in started:
                raise KafkaTestError(str(started["error"]))
            self._bootstrap = str(started["bootstrap"])
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server and remove everything it has written. This has no effect if the server does not run."""
        process, self._process = self._process, None
        if self._control is not None:
            self._control.close()
            self._control, self._received = None, b""
        if process is not None:
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None
        self._bootstrap = ""

    def log(self) -> str:
        """Return what the server has logged since its start; empty if it does not run."""
        if self._log is None:
            return ""
        size_bytes = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size_bytes, 0).decode("utf-8", "replace")

    # --- topics ---------------------------------------------------------------------------------------------------

    def create_topic(self, name: str | None = None, *, partitions: int = 1) -> str:
        """Create a topic and return its name. Without `name`, the server chooses a new name."""
        chosen = name or f"topic-{os.getpid()}-{next(self._numbers)}"
        self._do("create_topic", name=chosen, partitions=partitions)
        return chosen

    def reset(self) -> None:
        """Delete all topics and groups and end all faults. Members that are still alive may join again."""
        self._do("reset")

    # --- groups ---------------------------------------------------------------------------------------------------

    def members(self, group: str) -> dict[str, str]:
        """Return the client id of each member of a group by member id."""
        return dict(self._do("members", group=group))

    def lose_member(self, group: str, member_id: str | None = None, *, timeout: float = 30.0) -> str:
        """End the session of a member, by default the oldest member, as if it had been silent for too long.

        Return the member's id once the group has removed the member. The client learns of the removal from its next
        heartbeat or commit, as after a pause, and joins again.
        """
        return str(self._do("lose_member", group=group, member_id=member_id, timeout_s=timeout))

    def rebalance(self, group: str, *, timeout: float = 30.0) -> None:
        """Let one more member join a classic or consumer group and leave again.

        Return once the members own their partitions again. Members learn of a rebalance from their next heartbeats. So
        this takes some heartbeat intervals, and the members must poll.
        """
        self._do("rebalance", group=group, timeout_s=timeout)

    # --- faults ---------------------------------------------------------------------------------------------------

    def fail_next(self, api: str, error: str | None = "UNKNOWN_SERVER_ERROR", *, times: int = 1) -> None:
        """Refuse the next requests of an API, such as "Produce", with an error, such as "NOT_LEADER_OR_FOLLOWER".

        A refused request changes nothing. If the error is None, the broker closes the connection instead of answering.
        """
        self._do("fail_next", api=api, error=error, times=times)

    def slow(self, api: str, ms: int) -> None:
        """Delay every request of an API by `ms` milliseconds from now on; 0 ends the delay."""
        self._do("slow", api=api, ms=ms)

    def heal(self) -> None:
        """End all faults."""
        self._do("heal")

    def restart(self) -> None:
        """Restart the broker as a rolling upgrade does: its data, groups and address stay."""
        self._do("restart")

    # --- the control socket ---------------------------------------------------------------------------------------

    def _do(self, action: str, **arguments: Any) -> Any:
        with self._turn:
            if self._control is None:
                raise KafkaTestError("the test server does not run")
            number = next(self._actions)
            try:
                line = json.dumps({"number": number, "do": action, "with": arguments})
                self._control.sendall(line.encode() + b"\n")
            except OSError as error:
                raise self._ended() from error
            # An earlier action may have been interrupted, for example by Ctrl-C, before its answer came.
            while (answer := self._receive(ACTION_SECONDS + float(arguments.get("timeout_s", 0))))["number"] != number:
                pass
            if "error" in answer:
                raise KafkaTestError(str(answer["error"]))
            return answer["result"]

    def _receive(self, seconds: float) -> dict[str, Any]:
        """Return the next line. Raise KafkaTestError if it does not arrive in time."""
        assert self._control is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or len(self._received) > MAX_LINE_BYTES:
                raise KafkaTestError(f"the test server did not answer in {seconds:g} s:\n{self._log_tail()}")
            self._control.settimeout(left_s)
            try:
                part = self._control.recv(65536)
            except TimeoutError:
                continue
            except OSError as error:
                raise self._ended() from error
            if not part:
                raise self._ended()
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> KafkaTestError:
        code: int | None = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(STOP_SECONDS)
        return KafkaTestError(f"the test server has ended with exit code {code}:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return "\n".join(self.log().splitlines()[-LOG_TAIL_LINES:])
