"""`python -m bench.probe serve ...`: the gateway as `sluice` runs it, with a probe on its event loop.

A timer is due every millisecond. The probe measures the CPU time of the loop's thread between two timers, which other
processes on the machine do not change. On SIGUSR1 it writes three figures to the file that BENCH_PROBE names: the
greatest CPU time since the last SIGUSR1, the longest garbage collection and the greatest wall-clock lag.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

from gateway.app import App
from gateway.cli import main

TICK_S = 0.001


class LoopProbe:
    def __init__(self, loop: asyncio.AbstractEventLoop, report: Path) -> None:
        self._loop = loop
        self._report = report
        self._held_ms = self._late_ms = self._collected_ms = 0.0
        self._collecting_since_s = 0.0
        gc.callbacks.append(self._collecting)
        self._wall_s, self._cpu_s = time.perf_counter(), time.thread_time()
        loop.add_signal_handler(signal.SIGUSR1, self._tell)
        loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        self._held_ms = max(self._held_ms, (cpu_s - self._cpu_s) * 1000)
        self._late_ms = max(self._late_ms, (wall_s - self._wall_s - TICK_S) * 1000)
        self._wall_s, self._cpu_s = wall_s, cpu_s
        self._loop.call_later(TICK_S, self._tick)

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since_s = time.thread_time()
        else:
            self._collected_ms = max(self._collected_ms, (time.thread_time() - self._collecting_since_s) * 1000)

    def _tell(self) -> None:
        figures = {"held_ms": self._held_ms, "late_ms": self._late_ms, "collected_ms": self._collected_ms}
        fresh = self._report.with_suffix(".fresh")
        fresh.write_text(json.dumps(figures))
        fresh.replace(self._report)
        self._held_ms = self._late_ms = self._collected_ms = 0.0


async def start_with_probe(app: App) -> None:
    await start(app)
    LoopProbe(asyncio.get_running_loop(), Path(os.environ["BENCH_PROBE"]))


start = App.start

if __name__ == "__main__":
    App.start = start_with_probe  # type: ignore[method-assign]
    sys.exit(main())
