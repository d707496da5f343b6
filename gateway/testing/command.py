"""`sluice test-server`: a gateway with a Postgres of its own, both gone when it ends.

The one idea: the server belongs to one process and ends with it. That is the command after `--`, or the process at the
other end of the control socket, or the terminal. The control socket is inherited, so no other process can reach it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.config.log_options import LOG_LEVELS

if TYPE_CHECKING:
    from gateway.testing.node import TestNode

EXIT_FAILED = 1
EXIT_NOT_FOUND = 127
MAX_LINE_BYTES = 1024 * 1024
BOOTSTRAP_VARIABLES = ("KAFKA_BOOTSTRAP_SERVERS", "SLUICE_BOOTSTRAP")
"""Variables by which the command finds the server."""


def add_test_server(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serve on a free port of 127.0.0.1 until the command after -- has ended, or until Ctrl-C. The command finds "
        f"the address in {' and '.join(BOOTSTRAP_VARIABLES)}. Nothing is kept."
    )
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="where to serve (a free port)")
    parser.add_argument("--postgres-bin", type=Path, default=None, metavar="DIR", help="programs of a Postgres to use")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="a broker setting")
    parser.add_argument("--print-bootstrap", action="store_true", help="print HOST:PORT once the server is ready")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="warning", help="of the lines on stderr (warning)")
    parser.add_argument("--control-fd", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …", help="what to run beside it")
    parser.set_defaults(run=test_server)


def test_server(given: argparse.Namespace) -> int:
    # Objects that imports make live as long as the process. Collections in between would visit them again and again.
    gc.disable()
    import uvloop

    return uvloop.run(_run(given))


async def _run(given: argparse.Namespace) -> int:
    from gateway.operate import logs
    from gateway.testing.clusters import TestPostgres, remove_leftovers
    from storage.embedded import EmbeddedPostgresError
    from storage.errors import StorageError

    command: list[str] = given.command[1:] if given.command[:1] == ["--"] else given.command
    control = None if given.control_fd is None else socket.socket(fileno=given.control_fd)
    stopping = asyncio.Event()
    logs.configure("console", given.log_level)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    postgres = TestPostgres(given.postgres_bin)
    node: TestNode | None = None
    # This import takes longer than the start of Postgres, so both run at the same time.
    importing = asyncio.create_task(asyncio.to_thread(_import_node))
    try:
        url = await postgres.start()
        node_class = await importing
        gc.enable()
        gc.freeze()
        node = node_class(url, given.listen, given.set)
        await node.start()
        if given.print_bootstrap:
            print(node.bootstrap, flush=True)
        if control is not None:
            await _obey(control, node, stopping)
            return 0
        if command:
            return await _run_beside(command, node.bootstrap, stopping)
        await stopping.wait()
        return 0
    except (EmbeddedPostgresError, StorageError, ValueError, OSError) as error:
        message = " ".join(str(error).split())
        if control is not None:
            with contextlib.suppress(OSError):
                control.sendall(json.dumps({"error": message}).encode() + b"\n")
        print(f"sluice: {message}", file=sys.stderr)
        return EXIT_FAILED
    finally:
        await asyncio.wait((importing,))
        if node is not None:
            await node.stop()
        await postgres.stop()
        await asyncio.to_thread(remove_leftovers)


def _import_node() -> type[TestNode]:
    from gateway.testing.node import TestNode

    return TestNode


async def _run_beside(command: Sequence[str], bootstrap: str, stopping: asyncio.Event) -> int:
    """Run the command with the server's address in its environment, and return its exit code."""
    environment = {**os.environ, **dict.fromkeys(BOOTSTRAP_VARIABLES, bootstrap)}
    try:
        process = await asyncio.create_subprocess_exec(*command, env=environment)
    except OSError as error:
        print(f"sluice: cannot run {command[0]}: {error.strerror or error}", file=sys.stderr)
        return EXIT_NOT_FOUND
    ended = asyncio.create_task(process.wait())
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait((ended, told), return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    told.cancel()
    code = await ended
    return code if code >= 0 else 128 - code  # a signal's number is negative here, and a shell adds 128 to it


async def _obey(control: socket.socket, node: TestNode, stopping: asyncio.Event) -> None:
    """Execute commands from the other end, one line of JSON each, until the socket closes or that process ends."""
    reader, writer = await asyncio.open_connection(sock=control, limit=MAX_LINE_BYTES)
    writer.write(json.dumps({"bootstrap": node.bootstrap, "pid": os.getpid()}).encode() + b"\n")
    obeying = asyncio.create_task(_answer_lines(reader, writer, node))
    told = asyncio.create_task(stopping.wait())
    with _parents_end(stopping):
        await asyncio.wait((obeying, told), return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    obeying.cancel()
    await asyncio.wait((obeying,))
    writer.close()


@contextlib.contextmanager
def _parents_end(stopping: asyncio.Event) -> Generator[None]:
    """Set `stopping` when the parent ends, even if a child of it still holds the control socket open. Linux only."""
    if not hasattr(os, "pidfd_open"):
        yield
        return
    loop = asyncio.get_running_loop()
    try:
        parent = os.pidfd_open(os.getppid())
    except OSError:
        stopping.set()
        yield
        return
    loop.add_reader(parent, stopping.set)
    try:
        yield
    finally:
        loop.remove_reader(parent)
        os.close(parent)


async def _answer_lines(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, node: TestNode) -> None:
    while line := await reader.readline():
        wanted = json.loads(line)
        answer: dict[str, object] = {"number": wanted["number"]}
        try:
            answer["result"] = await node.do(wanted["do"], wanted.get("with", {}))
        except Exception as error:  # noqa: BLE001 - the test gets every failure; the server goes on
            answer["error"] = str(error) or type(error).__name__
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
