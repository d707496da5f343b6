"""`sluice serve`: one node, or several under a supervisor.

The one idea: a failure before the node serves is one line on stderr and an exit code (2: refused configuration, 1: the
node could not start).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import structlog
import uvloop

from gateway.app import App, StartError
from gateway.config.broker import BrokerConfig
from gateway.config.listeners import Listener, render_address
from gateway.config.mechanisms import OAUTHBEARER
from gateway.config.security import listener_security
from gateway.config.settings import OPTIONS, Configuration, Settings
from gateway.net.collection import Survivors
from gateway.operate import logs, workers
from gateway.options import add_options, configuration_of

logger = structlog.get_logger(__name__)

END_TIMEOUT_S = 0.1
EXIT_FAILED = 1
COLLECTION_THRESHOLDS = (5_000, 4, 2)
"""Thresholds of the garbage collector. It collects the youngest generation after so many new objects, in some tenths
of a millisecond. It collects the next generation after so many of those collections, and everything after so many of
these. A full collection visits only objects made since the previous one."""


def add_serve(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument("--supervisor", type=int, default=None, help=argparse.SUPPRESS)
    parser.set_defaults(run=serve)


def serve(given: argparse.Namespace) -> int:
    if given.supervisor is not None:
        workers.die_with(given.supervisor)
    configuration = configuration_of(given)
    settings = configuration.settings
    if settings.workers > 1:
        return _supervise(configuration, given)
    advertised = settings.listeners[0].advertised
    logs.configure(settings.log_format, settings.log_level, render_address(advertised) if advertised[1] else None)
    _keep_large_blocks()
    _raise_descriptor_limit()
    return uvloop.run(_run(configuration))


def _supervise(configuration: Configuration, given: argparse.Namespace) -> int:
    settings = configuration.settings
    logs.configure(settings.log_format, settings.log_level, "supervisor")
    _warn(configuration)
    flags = [
        f"{option.flag}={getattr(given, option.field)}"
        for option in OPTIONS
        if hasattr(given, option.field) and option.name not in workers.OWN_FLAGS
    ]
    flags += [f"--set={assignment}" for assignment in given.set]
    flags += [f"--config={given.config}"] if given.config else []
    supervisor = workers.Supervisor(configuration, flags, as_json=logs.as_json(settings.log_format))
    return asyncio.run(supervisor.run(partial(greeting, settings)))


def _warn(configuration: Configuration) -> None:
    """Log the warnings. In a log of JSON every line must be JSON."""
    for warning in configuration.warnings:
        logger.warning("check the configuration", reason=warning)


async def _run(configuration: Configuration) -> int:
    code = await _serve_until_told(configuration)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left and (await asyncio.wait(left, timeout=END_TIMEOUT_S))[1]:
        # Some queries wait for a Postgres that does not answer. asyncpg cannot abandon them, and the loop would wait
        # too.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


async def _serve_until_told(configuration: Configuration) -> int:
    _warn(configuration)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    app = App(configuration.settings)
    starting = asyncio.create_task(app.start())
    asked_to_stop = asyncio.create_task(stopping.wait())
    await asyncio.wait((starting, asked_to_stop), return_when=asyncio.FIRST_COMPLETED)
    try:
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,))
            return 0
        starting.result()
        print(greeting(configuration.settings, app.bootstrap, app.addresses, app.console_url), flush=True)
        survivors = Survivors()
        # Nearly all later objects are freed by their reference counts. With Python's usual threshold of 700 objects,
        # garbage collection took a quarter of the time in which ten thousand groups joined.
        gc.set_threshold(*COLLECTION_THRESHOLDS)
        try:
            await asked_to_stop
        finally:
            survivors.close()
    except StartError as error:
        print(f"sluice: {_one_line(error)}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        asked_to_stop.cancel()
        await app.stop()
    return 0


def _one_line(error: Exception) -> str:
    """Join the lines of an error: Postgres adds details, and construct its path, on lines of their own."""
    return " ".join(str(error).split())


def greeting(
    settings: Settings, bootstrap: str, addresses: Mapping[str, str] | None = None, console_url: str = ""
) -> str:
    """Return what a person may try first. `bootstrap` leads to the first listener. `addresses` has those of all
    listeners by name; without it they are the advertised ones. `console_url` is empty without a console."""
    if not settings.roles.is_broker:
        return (
            f"Sluice is a controller at {bootstrap}. To ask it:\n"
            f"  kafka-metadata-quorum.sh --bootstrap-controller {bootstrap} describe --status"
        )
    first, *others = (listener for listener in settings.listeners if not listener.is_controller)
    options = _client_options(first, settings.broker)
    lines = [
        f"Sluice serves Kafka clients at {bootstrap}. To try it:",
        f"  echo hello | kcat -b {bootstrap} -t hello -P{options}",
        f"  kcat -b {bootstrap} -t hello -C -e{options}",
    ]
    if not options:
        lines.append(f"  python3 -m kafka.admin -b {bootstrap} topics list   (pip install kafka-python)")
    for listener in others:
        address = (addresses or {}).get(listener.name) or render_address(listener.advertised)
        lines.append(f"Listener {listener.name}:")
        lines.append(f"  kcat -b {address} -L{_client_options(listener, settings.broker)}")
    if console_url:
        lines.append(f"To watch it, open {console_url}")
    return "\n".join(lines)


def _client_options(listener: Listener, broker: BrokerConfig) -> str:
    """Return the options that librdkafka needs to connect to a listener; none for a plaintext listener."""
    security = listener_security(listener, broker)
    options: list[str] = []
    if security.sasl is not None or security.tls is not None:
        options.append(f"security.protocol={listener.security_protocol}")
    if security.sasl is not None:
        mechanism = security.sasl.mechanisms[0]
        options.append(f"sasl.mechanism={mechanism}")
        if mechanism == OAUTHBEARER:
            options += ["sasl.oauthbearer.method=oidc", "sasl.oauthbearer.token.endpoint.url=URL"]
            options += ["sasl.oauthbearer.client.id=ID", "sasl.oauthbearer.client.secret=SECRET"]
        else:
            options += ["sasl.username=USER", "sasl.password=PASSWORD"]
    if security.tls is not None:
        options.append("ssl.ca.location=CA.pem")
        if security.tls.client_auth == "required":
            options += ["ssl.certificate.location=CERTIFICATE.pem", "ssl.key.location=KEY.pem"]
    return "".join(f" -X {option}" for option in options)


def _keep_large_blocks() -> None:
    """Let glibc reuse the megabyte buffers of frames instead of mapping and unmapping each, which costs a page fault
    per 4 KiB received. Without effect on other C libraries."""
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2
    mallopt: Callable[[int, int], object] | None = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 32 * 1024 * 1024)
        mallopt(trim_threshold, 64 * 1024 * 1024)
        mallopt(top_pad, 4 * 1024 * 1024)


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files: a connection is a descriptor, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
