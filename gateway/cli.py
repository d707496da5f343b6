"""The `sluice` command: serve, config, decode, healthcheck, apis, and those of `gateway/commands`.

The one idea: a command parses its arguments and calls one function; what can go wrong before serving is one line on
stderr and an exit code (2: refused configuration or arguments, 1: could not run).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import dataclasses
import gc
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import uvloop

from gateway.apis import SERVED
from gateway.app import App, StartError
from gateway.commands import add_commands
from gateway.config.broker import BROKER_CONFIGS
from gateway.config.definition import render
from gateway.config.listeners import render_address
from gateway.config.security import TlsSettings, listener_security
from gateway.config.settings import OPTIONS, Configuration, ConfigurationError, Settings, load
from gateway.net.collection import Survivors
from gateway.net.context import Role
from gateway.operate import logs, workers
from gateway.operate.http import program_version
from gateway.operate.nodes import add_nodes
from gateway.operate.upkeep import add_backup, add_check, add_restore
from gateway.operate.users import add_users
from protocol.api_keys import ApiKey
from protocol.codec import decode, encode, request_class, response_class
from protocol.errors import ProtocolError
from protocol.grammar import parse
from protocol.headers import RequestHeader, decode_response_header, encode_request_header
from protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse

HEALTHCHECK_TIMEOUT_S = 3.0
END_TIMEOUT_S = 0.1
EXIT_FAILED, EXIT_REFUSED = 1, 2
COLLECTION_THRESHOLDS = (5_000, 4, 2)
"""New objects before a collection of the youngest, which takes some tenths of a millisecond; how many of those before
one of the next generation, and of these before a full one, which looks at what has come since the one before."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; `arguments` default to the process's."""
    given = _parser().parse_args(arguments)
    try:
        code = int(given.run(given))
        sys.stdout.flush()
    except ConfigurationError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except BrokenPipeError:
        # Whoever read has had enough (`sluice config | head`); the interpreter must not flush into the void at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sluice", description="A Kafka-protocol gateway on Postgres.")
    parser.add_argument("--version", action="version", version=f"sluice {program_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="serve Kafka clients", description=_OPTIONS_HELP)
    _add_options(serve)
    serve.add_argument("--supervisor", type=int, default=None, help=argparse.SUPPRESS)
    serve.set_defaults(run=_serve)

    config = commands.add_parser("config", help="show each option's value and origin", description=_OPTIONS_HELP)
    _add_options(config)
    config.set_defaults(run=_config)

    healthcheck = commands.add_parser("healthcheck", help="do an ApiVersions round trip; exit code 0 or 1")
    healthcheck.add_argument("address", nargs="?", metavar="HOST:PORT", help="default: where `serve` would listen")
    healthcheck.set_defaults(run=_healthcheck)

    decoding = commands.add_parser("decode", help="show the fields of a message's body")
    decoding.add_argument("api", help="name or key, e.g. JoinGroup, join_group or 11")
    decoding.add_argument("api_version", metavar="version", type=int)
    decoding.add_argument("hex", help="the body without size and header; spaces are ignored; - reads standard input")
    decoding.add_argument("--response", action="store_true", help="the bytes are a response")
    decoding.set_defaults(run=_decode)

    apis = commands.add_parser("apis", help="list what is served")
    apis.add_argument("--markdown", action="store_true", help="as a table for the README")
    apis.set_defaults(run=_apis)

    for name, said, add in (
        ("check", "read every record and say what is wrong", add_check),
        ("backup", "copy the database and its records while a node serves", add_backup),
        ("restore", "make an empty data directory what a backup was", add_restore),
        ("nodes", "list the live nodes, their leases and how far they are behind", add_nodes),
    ):
        upkeep = commands.add_parser(name, help=said, description=_OPTIONS_HELP)
        _add_options(upkeep)
        add(upkeep, lambda given: _configuration(given).settings)

    users = commands.add_parser("users", help="who may authenticate by SCRAM: add, list, delete")
    options = argparse.ArgumentParser(add_help=False)
    _add_options(options)
    add_users(
        users.add_subparsers(metavar="COMMAND", required=True), options, lambda given: _configuration(given).settings
    )
    add_commands(commands)
    return parser


_OPTIONS_HELP = (
    "A flag beats the environment (SLUICE_ and the option's name in capitals), which beats the file (TOML), which "
    "beats the default."
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    for option in OPTIONS:
        default = "" if option.default is None else f" (default {option.default})"
        parser.add_argument(option.flag, metavar=option.metavar, help=option.help + default, default=argparse.SUPPRESS)
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a broker setting under Kafka's name, e.g. num.partitions=3; may be repeated",
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file: options by name, broker settings in [broker]")


def _configuration(given: argparse.Namespace) -> Configuration:
    flags = {option.name: getattr(given, option.field) for option in OPTIONS if hasattr(given, option.field)}
    return load(flags, getattr(given, "set", []), os.environ, getattr(given, "config", None))


# --- serve ------------------------------------------------------------------------------------------------------------


def _serve(given: argparse.Namespace) -> int:
    if given.supervisor is not None:
        workers.die_with(given.supervisor)
    configuration = _configuration(given)
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
    return asyncio.run(supervisor.run(partial(_welcome, settings)))


async def _run(configuration: Configuration) -> int:
    code = await _serve_until_told(configuration)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left and (await asyncio.wait(left, timeout=END_TIMEOUT_S))[1]:
        # Queries to a Postgres that does not answer, which asyncpg cannot give up either; the loop would wait for them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _warn(configuration: Configuration) -> None:
    for warning in configuration.warnings:
        print(f"sluice: warning: {warning}", file=sys.stderr)


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
        print(_welcome(configuration.settings, app.bootstrap), flush=True)
        survivors = Survivors()
        # Of what comes later nearly all is freed by itself. Ten thousand groups that join spent a quarter of their time
        # in the collector at Python's 700.
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
    """Postgres adds details and construct its path in lines of their own."""
    return " ".join(str(error).split())


def _welcome(settings: Settings, bootstrap: str) -> str:
    if not settings.roles.is_broker:
        return (
            f"Sluice is a controller at {bootstrap}. To ask it:\n"
            f"  kafka-metadata-quorum.sh --bootstrap-controller {bootstrap} describe --status"
        )
    return (
        f"Sluice serves Kafka clients at {bootstrap}. To try it:\n"
        f"  echo hello | kcat -b {bootstrap} -t greetings -P\n"
        f"  kcat -b {bootstrap} -t greetings -C -e\n"
        f"  python3 -m kafka.admin -b {bootstrap} topics list   (pip install kafka-python)"
    )


def _keep_large_blocks() -> None:
    """Lets glibc reuse the megabyte buffers of frames instead of mapping and unmapping each, which costs a page fault
    per 4 KiB received. Without effect on other C libraries."""
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_threshold, 32 * 1024 * 1024)
        mallopt(trim_threshold, 64 * 1024 * 1024)
        mallopt(top_pad, 4 * 1024 * 1024)


def _raise_descriptor_limit() -> None:
    """A connection is a descriptor, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- the others -------------------------------------------------------------------------------------------------------


def _config(given: argparse.Namespace) -> int:
    configuration = _configuration(given)
    rows = [(value.name, value.text, value.origin) for value in configuration.values]
    shown = {name for name, _, _ in rows}
    others = [key for name, key in BROKER_CONFIGS.items() if name not in shown and not key.internal]
    rows += [(key.name, render(key.default), "default") for key in others]
    _print_columns([(name, "-" if text is None else text, origin) for name, text, origin in rows])
    _warn(configuration)
    return 0


def _healthcheck(given: argparse.Namespace) -> int:
    flags = {} if given.address is None else {"listen": given.address}
    settings = load(flags, (), os.environ).settings
    # Without TLS where there is a listener of that kind: what is asked is whether it serves, not who it is.
    listener = min(settings.listeners, key=lambda each: each.security_protocol.endswith("SSL"))
    host, port = listener.bind
    tls = listener_security(listener, settings.broker).tls
    # Of several workers each must answer; an address that was given is that of one.
    asked = range(port, port + (settings.workers if given.address is None else 1))
    return max(_check_health(host, each, tls=tls) for each in asked)


def _check_health(host: str, port: int, *, tls: TlsSettings | None) -> int:
    if host in ("", "0.0.0.0", "::"):
        host = "::1" if host == "::" else "127.0.0.1"
    try:
        code = _ask_api_versions(host, port, tls=tls)
    except (OSError, ProtocolError) as error:
        print(f"sluice: {host}:{port} does not answer: {error}", file=sys.stderr)
        return EXIT_FAILED
    if code:
        print(f"sluice: {host}:{port} answers with error {code}", file=sys.stderr)
        return EXIT_FAILED
    print(f"{host}:{port} answers")
    return 0


def _ask_api_versions(host: str, port: int, *, tls: TlsSettings | None) -> int:
    """The error code of an ApiVersions v0 answer. Raises OSError or ProtocolError if there is none."""
    header = encode_request_header(RequestHeader(ApiKey.API_VERSIONS, 0, 1, "sluice-healthcheck"))
    frame = header + b"".join(encode(ApiVersionsRequest(), 0))
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((host, port), timeout=HEALTHCHECK_TIMEOUT_S))
        if tls is not None:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = stack.enter_context(context.wrap_socket(connection))
            if tls.client_auth == "required":
                return 0  # Its half of the handshake is all that a node answers to who shows no certificate.
        connection.sendall(len(frame).to_bytes(4, "big") + frame)
        answer = _receive(connection, int.from_bytes(_receive(connection, 4), "big"))
    _, position = decode_response_header(ApiKey.API_VERSIONS, 0, answer)
    response, _ = decode(ApiVersionsResponse, 0, answer, position)
    return response.error_code


def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < size_bytes:
        part = connection.recv(min(size_bytes - len(received), 65536))
        if not part:
            raise ProtocolError("the connection was closed")
        received += part
    return bytes(received)


def _decode(given: argparse.Namespace) -> int:
    api_key = _find_api(given.api)
    if api_key is None:
        print(f"sluice: there is no API {given.api!r}", file=sys.stderr)
        return EXIT_REFUSED
    text: str = sys.stdin.read() if given.hex == "-" else given.hex
    try:
        body = bytes.fromhex("".join(text.split()))
    except ValueError:
        print("sluice: the body is not hexadecimal", file=sys.stderr)
        return EXIT_REFUSED
    try:
        message_type = response_class(api_key) if given.response else request_class(api_key)
        message, end = parse(message_type, given.api_version, body)
    except KeyError:
        print(f"sluice: {api_key.name} is not declared", file=sys.stderr)
        return EXIT_REFUSED
    except (ValueError, ProtocolError) as error:
        print(f"sluice: {_one_line(error)}", file=sys.stderr)
        return EXIT_FAILED
    print("\n".join(_describe(message)))
    if end != len(body):
        print(f"sluice: {len(body) - end} bytes are left over", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _find_api(text: str) -> ApiKey | None:
    wanted = text.replace("_", "").lower()
    for api_key in ApiKey:
        if wanted in (str(int(api_key)), api_key.name.replace("_", "").lower()):
            return api_key
    return None


def _describe(value: object, name: str = "", depth: int = 0) -> list[str]:
    """A message as indented lines, one per field."""
    indent = "  " * depth
    label = f"{indent}{name}: " if name else indent
    if dataclasses.is_dataclass(value):
        lines = [f"{label}{type(value).__name__}"]
        for field in dataclasses.fields(value):
            lines += _describe(getattr(value, field.name), field.name, depth + 1)
        return lines
    if isinstance(value, tuple) and value:
        elements = cast("tuple[object, ...]", value)
        lines = [f"{indent}{name}:"]
        for index, element in enumerate(elements):
            lines += _describe(element, f"[{index}]", depth + 1)
        return lines
    if isinstance(value, memoryview):
        value = cast("memoryview[int]", value).tobytes()
    if isinstance(value, bytes):
        return [f"{label}{len(value)} bytes {value.hex()}"]
    return [f"{label}{value!r}"]


def _apis(given: argparse.Namespace) -> int:
    rows = [
        (
            _upstream_name(line.api_key),
            str(int(line.api_key)),
            f"{line.min_version}-{line.max_version}",
            "broker, controller" if Role.CONTROLLER in line.roles else "broker",
        )
        for line in sorted(SERVED, key=lambda line: line.api_key)
    ]
    if given.markdown:
        print("| API | Key | Versions | Asked of a |\n|---|---|---|---|")
        for row in rows:
            print(f"| {' | '.join(row)} |")
    else:
        _print_columns([("API", "KEY", "VERSIONS", "ASKED OF A"), *rows])
    return 0


def _upstream_name(api_key: ApiKey) -> str:
    return "".join(word.capitalize() for word in api_key.name.split("_"))


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
