"""`sluice serve --workers N`: N nodes on this host, each a process, under one supervisor.

The one idea: a worker is `sluice serve` with addresses of its own, so it is a node like any other, and the supervisor
knows nothing of Kafka. The supervisor owns what the workers share: the embedded Postgres, the stream of their lines,
and their shutdown. A worker that ends after it has served is restarted with back-off. A worker that ends before it ever
served was refused something (a port, a database), and then all workers stop. The kernel kills the workers when the
supervisor dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import structlog

from gateway.config.broker import NODE_ID_NAMES
from gateway.config.errors import ConfigurationError
from gateway.config.listeners import render_address
from gateway.config.settings import Configuration, Settings
from storage.embedded import EmbeddedPostgres, EmbeddedPostgresError
from storage.types import Address

logger = structlog.get_logger(__name__)

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.5, 30.0
STEADY_S = 60.0
"""If a worker has served for this long, its next restart uses the first, shortest back-off."""
STOP_MARGIN_S = 5.0
"""Time that a worker may take longer than its drain before it is killed."""
MAX_LINE_BYTES = 1024 * 1024
"""A longer line is split in two."""
SPARE_CONNECTIONS = 10
"""Number of connections for `psql`, a backup, and those that Postgres reserves."""
MAX_PORT = 65535
EXIT_FAILED = 1
_PR_SET_PDEATHSIG = 1
_ROOMS = Path(__file__).parents[2]
"""Directory of this program's packages, which an installed wheel does not put on every process's import path."""
_OWN_VARIABLES = frozenset({"SLUICE_LISTEN", "SLUICE_ADVERTISE", "SLUICE_METRICS_LISTEN", "SLUICE_WORKERS"})
OWN_FLAGS = frozenset({"listen", "advertise", "metrics-listen", "workers", "log-store", "log-format"})
"""Options for which each worker gets a value of its own."""


@dataclass(slots=True, eq=False)
class Worker:
    """One node: its addresses as flags, and its process."""

    name: str
    """HOST:PORT at which clients reach the node's first listener. This is also the node's name."""
    flags: tuple[str, ...]
    binds: tuple[Address, ...] = ()
    """Every address on which the node listens."""
    process: asyncio.subprocess.Process | None = None
    serving_since_s: float | None = None
    """Time at which the current process began to serve."""
    served: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the worker has served for the first time. It is never cleared."""


def plan(configuration: Configuration) -> list[Worker]:
    """Return the workers; the n-th adds n to every port. Raise ConfigurationError if that is impossible."""
    settings = configuration.settings
    given = {value.name for value in configuration.values}
    by_kafkas_names = not given.isdisjoint({"listeners", "advertised.listeners"})
    workers: list[Worker] = []
    taken: set[Address] = set()
    for number in range(settings.workers):
        bound = {listener.name: _shifted(listener.bind, number, settings) for listener in settings.listeners}
        told = {
            listener.name: listener.advertised
            if listener.is_shared
            else _shifted(listener.advertised, number, settings)
            for listener in settings.listeners
        }
        metrics = None if settings.metrics_listen is None else _shifted(settings.metrics_listen, number, settings)
        binds = (*bound.values(), *([metrics] if metrics else ()))
        for address in binds:
            if address in taken:
                text = f"{render_address(address)} would be taken twice"
                raise _refused(settings, f"{text}: each address needs as many ports in a row as there are workers")
            taken.add(address)
        flags = [f"--metrics-listen={render_address(metrics) if metrics else 'off'}", "--workers=1"]
        if number:
            flags.append("--set=console.listen=")  # the first worker's console shows every node
        if by_kafkas_names:
            flags += [
                f"--set=listeners={','.join(f'{name}://{render_address(each)}' for name, each in bound.items())}",
                f"--set=advertised.listeners={','.join(f'{n}://{render_address(each)}' for n, each in told.items())}",
            ]
        else:
            (listen,), (advertise,) = bound.values(), told.values()
            flags += [f"--listen={render_address(listen)}", f"--advertise={render_address(advertise)}"]
        if settings.broker.node_id is not None:
            flags += [f"--set={name}={settings.broker.node_id + number}" for name in NODE_ID_NAMES if name in given]
        workers.append(Worker(render_address(next(iter(told.values()))), tuple(flags), binds))
    return workers


def _shifted(address: Address, number: int, settings: Settings) -> Address:
    host, port = address
    if not port:
        raise _refused(
            settings, f"{render_address(address)} has port 0: workers need consecutive ports, so name the first"
        )
    if port + number > MAX_PORT:
        raise _refused(settings, f"there is no port {port + number}")
    return host, port + number


def _refused(settings: Settings, reason: str) -> ConfigurationError:
    return ConfigurationError("workers", str(settings.workers), "the options together", reason)


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the supervisor dies; end at once if that has happened already. The
    kernel kills the process instead of asking it to stop, because no process reads its lines any more. Do nothing if
    the system has no prctl.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        raise SystemExit(EXIT_FAILED)


class _PortTakenError(Exception):
    """A port is taken. The message is one line for the person who started the workers."""


class Supervisor:
    """Start the workers, once, with `run`, which returns the exit code when all have ended."""

    def __init__(self, configuration: Configuration, flags: Sequence[str], *, as_json: bool) -> None:
        """Take the configuration and `flags`, the user's flags other than `OWN_FLAGS`, which each worker gets."""
        self._settings = configuration.settings
        self._workers = plan(configuration)
        store = self._settings.log_place
        self._flags = (
            *flags,
            f"--log-store={store.absolute() if isinstance(store, Path) else store or 'inline'}",
            f"--log-format={'json' if as_json else 'console'}",
        )
        self._as_json = as_json
        self._stopping = asyncio.Event()
        self._code = 0

    async def run(self, welcome: Callable[[str], str]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        embedded: EmbeddedPostgres | None = None
        environment = {name: text for name, text in os.environ.items() if name not in _OWN_VARIABLES}
        others = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOMS), *([others] if others else [])])
        try:
            await self._find_ports_free()
            if self._settings.database_url is None:
                wanted = len(self._workers) * self._settings.connections + SPARE_CONNECTIONS
                embedded = EmbeddedPostgres(
                    self._settings.data_dir, connections=wanted, programs=self._settings.postgres_bin
                )
                url = await self._start(embedded)
                if url is None:
                    return self._code
                environment["SLUICE_DATABASE_URL"] = url
            await self._run_workers(environment, welcome)
        except (EmbeddedPostgresError, _PortTakenError) as error:
            print(f"sluice: {' '.join(str(error).split())}", file=sys.stderr)
            return EXIT_FAILED
        finally:
            if embedded is not None:
                await embedded.stop()
        return self._code

    async def _start(self, embedded: EmbeddedPostgres) -> str | None:
        """Start the server and return its URL. Return None if a signal arrives first: a recovery may take minutes."""
        starting = asyncio.create_task(embedded.start())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if starting.done():
            return starting.result()
        starting.cancel()
        await asyncio.wait((starting,))
        return None

    async def _find_ports_free(self) -> None:
        """Find a port that is taken before anything is created. Raise _PortTakenError."""
        loop = asyncio.get_running_loop()
        for host, port in (address for worker in self._workers for address in worker.binds):
            try:
                probe = await loop.create_server(
                    asyncio.Protocol, host or None, port, reuse_address=True, start_serving=False
                )
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
                raise _PortTakenError(f"cannot listen on {render_address((host, port))}: {reason}") from error
            probe.close()

    async def _run_workers(self, environment: Mapping[str, str], welcome: Callable[[str], str]) -> None:
        keeping = [asyncio.create_task(self._keep(worker, environment)) for worker in self._workers[:1]]
        first = asyncio.create_task(self._workers[0].served.wait())
        # The first worker creates what all nodes share (schema, log directory) before the other workers need it.
        await asyncio.wait((first, *keeping), return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        keeping += [asyncio.create_task(self._keep(worker, environment)) for worker in self._workers[1:]]
        welcoming = asyncio.create_task(self._welcome(welcome))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            # A keeper ends only when all workers are to stop, or by an unforeseen error: then all stop.
            await asyncio.wait((stopping, *keeping), return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            logger.info("stopping the workers")
            await asyncio.gather(*keeping)
        finally:
            for task in (welcoming, stopping, *keeping):
                task.cancel()

    async def _welcome(self, welcome: Callable[[str], str]) -> None:
        for worker in self._workers:
            await worker.served.wait()
        print(welcome(",".join(worker.name for worker in self._workers)), flush=True)

    # --- one worker -----------------------------------------------------------------------------------------------

    async def _keep(self, worker: Worker, environment: Mapping[str, str]) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            returncode = await self._run_once(worker, environment)
            if self._stopping.is_set():
                return
            since_s = worker.serving_since_s
            if not worker.served.is_set():
                logger.error(
                    "a worker ended before it served: stopping all workers", node=worker.name, returncode=returncode
                )
                self._code = returncode if returncode > 0 else EXIT_FAILED
                self._stopping.set()
                return
            if since_s is not None and time.monotonic() - since_s >= STEADY_S:
                backoff_s = FIRST_BACKOFF_S
            logger.error("a worker ended", node=worker.name, returncode=returncode, retry_in_s=backoff_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def _run_once(self, worker: Worker, environment: Mapping[str, str]) -> int:
        """Start the worker, wait until it has ended, and return its exit code, negative for a signal."""
        worker.serving_since_s = None
        try:
            process = await asyncio.create_subprocess_exec(
                # With -P, modules in the working directory cannot hide our modules.
                *(sys.executable, "-P", "-m", "gateway.cli", "serve", f"--supervisor={os.getpid()}"),
                *self._flags,
                *worker.flags,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
            )
        except OSError as error:
            # Memory, processes or open files are exhausted, perhaps only for a moment. The other workers serve on.
            logger.error("a worker cannot be started", node=worker.name, error=str(error))
            return EXIT_FAILED
        worker.process = process
        assert process.stdout is not None
        assert process.stderr is not None
        reading = asyncio.gather(
            self._pass_on(worker, process.stdout, None), self._pass_on(worker, process.stderr, sys.stderr.buffer)
        )
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await self._stop(worker, process, ended)
            code = await ended
            await reading
            return code
        finally:
            stopping.cancel()
            worker.process = None
            if process.returncode is None:
                process.kill()

    async def _stop(self, worker: Worker, process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
        limit_s = self._settings.drain_ms / 1000 + STOP_MARGIN_S
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        finished, _ = await asyncio.wait((ended,), timeout=limit_s)
        if not finished:
            logger.error("a worker did not stop: killing it", node=worker.name, waited_s=limit_s)
            self._code = EXIT_FAILED
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    # --- its lines ------------------------------------------------------------------------------------------------

    async def _pass_on(self, worker: Worker, stream: asyncio.StreamReader, out: BinaryIO | None) -> None:
        """Write the lines to `out`, each with the worker's name. If `out` is None, the first line signals readiness:
        a node prints only its banner to standard output, and the supervisor prints one for all."""
        while line := await _read_line(stream):
            if out is not None:
                # A line that cannot be written is lost. The worker would wait for ever if its lines were not read.
                with contextlib.suppress(OSError):
                    out.write(named(worker.name, line, as_json=self._as_json))
                    out.flush()
            elif worker.serving_since_s is None:
                worker.serving_since_s = time.monotonic()
                worker.served.set()


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Return a line with its end; empty at the end of the stream."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(error.consumed)


def named(name: str, line: bytes, *, as_json: bool) -> bytes:
    """Return a node's line in the form of the common stream, in which either every line is JSON or no line."""
    text = line.rstrip(b"\r\n")
    if not as_json:
        return name.encode() + b" | " + text + b"\n"
    if text.startswith(b"{") and text.endswith(b"}"):
        return text + b"\n"  # the node has already added its name
    said = {"node": name, "level": "warning", "event": text.decode("utf-8", "replace")}
    return json.dumps(said).encode() + b"\n"
