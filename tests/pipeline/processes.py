"""A job as its own process, as a user starts it. Tests read its output, kill it with its JVM, and start it again."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil

from tests.gateway_process import free_ports
from tests.pipeline.conftest import FAST_JVM

JOB_SECONDS = 900.0
START_SECONDS = 120.0
EXECUTOR = "CoarseGrainedExecutorBackend"


class Job:
    """`sluice-pipeline GIVEN`, in a process group of its own, which includes its JVM."""

    def __init__(self, *given: str, master: str = "local[2]", memory: str = "1g") -> None:
        # --nice gives the job a share of CPU time. Under the default, SCHED_IDLE, concurrent tests may leave it none.
        start = [sys.executable, "-m", "pipeline.cli", given[0], "--nice", "10"]
        command = [*start, "--json", "--master", master, "--memory", memory]
        self.said: list[dict[str, Any]] = []
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._process = subprocess.Popen(
            [*command, *given[1:]],
            env={**os.environ, "JAVA_TOOL_OPTIONS": FAST_JVM},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.errors: list[str] = []
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def wait_for(self, event: str) -> dict[str, Any] | None:
        """Return the next line that reports this event; None if the job ends before."""
        while (line := self._lines.get(timeout=JOB_SECONDS)) is not None:
            if line.get("event") == event:
                return line
        return None

    @property
    def niceness(self) -> set[int]:
        """Return the niceness of the Python process and of its JVM."""
        whole = psutil.Process(self._process.pid)
        return {process.nice() for process in (whole, *whole.children(recursive=True))}

    def kill(self) -> None:
        """Send SIGKILL to the Python process and to the JVM at the same time."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(JOB_SECONDS)

    def signal(self, number: signal.Signals) -> None:
        """Send the signal to the Python process alone, as a supervisor signals the process that it started."""
        self._process.send_signal(number)

    def wait(self) -> int:
        try:
            code = self._process.wait(JOB_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        for thread in self._threads:
            thread.join(START_SECONDS)
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if text.startswith("{"):
                line = json.loads(text)
                self.said.append(line)
                self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self.errors.extend(self._process.stderr)


def run(*given: str, master: str = "local[2]") -> Job:
    """Run a job to its end. If it fails, raise AssertionError with its output."""
    job = Job(*given, master=master)
    try:
        code = job.wait()
    finally:
        job.close()
    assert code == 0, "".join(job.errors[-30:]) or job.said[-5:]
    return job


class Cluster:
    """A standalone Spark master with workers, each a process of its own."""

    def __init__(self, workers: int, folder: str) -> None:
        port, web = free_ports(2)
        self.master = f"spark://127.0.0.1:{port}"
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start("master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", str(web))
        for _ in range(workers):
            self.add_worker()

    def add_worker(self) -> None:
        web = str(free_ports(1)[0])
        self._start(
            *("worker.Worker", "--host", "127.0.0.1", "--cores", "1", "--memory", "1g"),
            *("--webui-port", web, "--work-dir", self._folder, self.master),
        )

    def kill_worker(self) -> None:
        """Kill the worker that was started last, and its executor, without a warning."""
        process = self._processes.pop()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(START_SECONDS)

    def kill_executor(self, chance: random.Random) -> None:
        """Kill one of the executors without a warning. Its worker starts another one."""
        executors = [
            child
            for process in self._processes
            for child in psutil.Process(process.pid).children()
            if EXECUTOR in command_line(child)
        ]
        assert executors, "no executor runs"
        chance.choice(executors).kill()

    def close(self) -> None:
        for process in self._processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(START_SECONDS)

    def _start(self, name: str, *given: str) -> None:
        """Start a worker by Spark's own script. A worker that was started as bare Java finds no jars for its
        executors."""
        import pyspark

        home = os.path.dirname(pyspark.__file__)
        environment: Mapping[str, str] = {
            **os.environ,
            "SPARK_HOME": home,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "JAVA_TOOL_OPTIONS": FAST_JVM,
        }
        command = [f"{home}/bin/spark-class", f"org.apache.spark.deploy.{name}", *given]
        with open(f"{self._folder}/{name}.log", "ab") as log:
            self._processes.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            )


def command_line(process: psutil.Process) -> str:
    """Return the arguments of a process; empty if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


@contextmanager
def cluster(workers: int, folder: str) -> Iterator[Cluster]:
    started = Cluster(workers, folder)
    try:
        yield started
    finally:
        started.close()


def wait_seconds(seconds: float) -> None:
    """Let a job run for a random time before it is killed. The time determines the moment of the fault; it is not a
    wait for an event.
    """
    time.sleep(seconds)
