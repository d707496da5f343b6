"""Report the progress of a long job, and stop it on a signal.

The one idea: a job reports each finished step (a batch, a phase). `Progress` prints one line with rows, rate, the rest
and its expected time, or the same as JSON with --json. If a job has printed nothing for a while, a heartbeat prints
what it is doing. The first SIGINT or SIGTERM stops the job after its current step; the second ends the program.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TextIO

SAY_SECONDS = 4.0
"""The longest silence of a running job. Its first line also appears within five seconds."""
LOOK_SECONDS = 0.5


class Progress:
    """Prints the lines of one job. With `as_json` each line is an object, for other programs."""

    def __init__(
        self,
        job: str,
        *,
        as_json: bool = False,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._as_json, self._now = job, as_json, now
        self._stream = stream if stream is not None else sys.stdout
        self._started = self._said = now()
        self._rows = 0
        self._doing = "prepares"
        self._watched: Callable[[], tuple[str, dict[str, Any]]] | None = None
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return self._now() - self._started

    def say(self, text: str, **figures: Any) -> None:
        """Print one line. `figures` are added to it in JSON only."""
        self._doing = text
        self._print(text, figures)

    def watch(self, words: Callable[[], tuple[str, dict[str, Any]]] | None) -> None:
        """Let `beat` print these words and figures from now on. None stands for the job's last line."""
        self._watched = words

    def beat(self) -> None:
        """Print what the job is doing if it has printed nothing for `SAY_SECONDS`."""
        if self._now() - self._said < SAY_SECONDS:
            return
        watched = self._watched
        words, figures = (f"still: {self._doing}", {"event": "still"}) if watched is None else watched()
        self._print(words, figures)

    def _print(self, text: str, figures: dict[str, Any]) -> None:
        if self._as_json:
            line = json.dumps(
                {"job": self._job, "seconds": round(self.seconds, 3), "say": text, **figures}, default=str
            )
        else:
            line = f"{self._job} {clock(self.seconds)} {text}"
        with self._lock:
            self._said = self._now()
            print(line, file=self._stream, flush=True)

    def step(self, what: str, rows: int, seconds: float, left: int | None = None, **figures: Any) -> None:
        """Print a finished step of `rows` that took `seconds`. `left` is the number of remaining rows, if known."""
        self._rows += rows
        rate = rows / seconds if seconds > 0 else 0.0
        average = self._rows / self.seconds if self.seconds > 0 else 0.0
        words = [f"{what}: {rows:,} rows in {seconds:.1f} s ({rate:,.0f}/s), {self._rows:,} in all"]
        if left is not None:
            words.append(f"{left:,} left" + (f", about {clock(left / average)}" if left and average else ""))
        self.say(", ".join(words), rows=rows, rate=round(rate), total=self._rows, left=left, **figures)


def clock(seconds: float) -> str:
    whole = int(seconds)
    return (
        f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}" if whole >= 3600 else f"{whole // 60}:{whole % 60:02}"
    )


class Stop:
    """The user's request to end the job. `wait` sleeps, but only until the request."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.waiting = False
        """True while the job waits; the heartbeat then prints nothing."""

    @property
    def asked(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        self.waiting = True
        try:
            return self._event.wait(seconds)
        finally:
            self.waiting = False

    def ask(self) -> None:
        self._event.set()

    def listen(self) -> None:
        """Handle SIGINT and SIGTERM. The second signal ends the program at once; committed batches stay."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._heard)

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.ask()
        print("Stopping after this step; ask again to stop at once.", file=sys.stderr, flush=True)


class Heartbeat:
    """A thread that prints what the job is doing, from the job's start to its end."""

    def __init__(self, lines: Progress, stop: Stop) -> None:
        self._lines, self._stop = lines, stop
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            if not self._stop.waiting:
                self._lines.beat()
