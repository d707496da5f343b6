"""Commands that need neither a database nor a cluster: `sluice config`, `decode`, `apis` and `healthcheck`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from typing import cast

from gateway.apis import SERVED
from gateway.config.broker_table import BROKER_CONFIGS
from gateway.config.definition import render
from gateway.config.listeners import parse_address
from gateway.config.security import TlsSettings, listener_security
from gateway.config.settings import load
from gateway.dumped import bytes_of
from gateway.net.context import Role
from gateway.options import add_options, configuration_of
from protocol.api_keys import ApiKey
from protocol.codec import decode, encode, request_class, response_class
from protocol.errors import ProtocolError
from protocol.grammar import parse
from protocol.headers import RequestHeader, decode_request_header, decode_response_header, encode_request_header
from protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse

HEALTHCHECK_TIMEOUT_S = 3.0
EXIT_FAILED, EXIT_REFUSED = 1, 2
_SIZE_BYTES = 4


def add_config(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.set_defaults(run=_config)


def add_healthcheck(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", nargs="?", metavar="HOST:PORT", help="default: where `serve` would listen")
    parser.set_defaults(run=_healthcheck)


def add_decode(parser: argparse.ArgumentParser) -> None:
    parser.usage = "sluice decode [-h] [--response] [API VERSION] BYTES"
    parser.add_argument(
        "message",
        nargs="+",
        metavar="API VERSION BYTES",
        help=(
            "the API's name or key (JoinGroup, join_group or 11), the version, and the body without size and header. "
            "Without API and version, BYTES is a whole request that begins with its size. BYTES is hexadecimal, "
            "base64, or a packet as tcpdump -X prints it; - reads standard input"
        ),
    )
    parser.add_argument("--response", action="store_true", help="the bytes are a response")
    parser.set_defaults(run=_decode)


def add_apis(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="as a table for docs/apis.md")
    parser.set_defaults(run=_apis)


def _config(given: argparse.Namespace) -> int:
    configuration = configuration_of(given)
    rows = [(value.name, value.text, value.origin) for value in configuration.values]
    shown = {name for name, _, _ in rows}
    others = [key for name, key in BROKER_CONFIGS.items() if name not in shown and not key.internal]
    rows += [(key.name, render(key.default), "default") for key in others]
    _print_columns([(name, "-" if text is None else text, origin) for name, text, origin in rows])
    for warning in configuration.warnings:
        print(f"sluice: warning: {warning}", file=sys.stderr)
    return 0


def _healthcheck(given: argparse.Namespace) -> int:
    flags = {} if given.address is None else {"listen": given.address}
    settings = load(flags, (), os.environ).settings
    # Prefer a listener without TLS: the check only asks whether the node serves, and needs no proof of its identity.
    listener = min(settings.listeners, key=lambda each: each.security_protocol.endswith("SSL"))
    host, port = listener.bind
    if given.address is not None:
        # The environment may name listeners by Kafka's settings. The one with the address's port says if TLS is used.
        host, port = parse_address(given.address)
        listener = next((each for each in settings.listeners if each.bind[1] == port), listener)
    tls = listener_security(listener, settings.broker).tls
    # If there are several workers, each must answer; a given address is that of one worker.
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
    """Return the error code of an ApiVersions v0 response. Raise OSError or ProtocolError if no response arrives."""
    header = encode_request_header(RequestHeader(ApiKey.API_VERSIONS, 0, 1, "sluice-healthcheck"))
    frame = header + b"".join(encode(ApiVersionsRequest(), 0))
    deadline_s = time.monotonic() + HEALTHCHECK_TIMEOUT_S
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((host, port), timeout=HEALTHCHECK_TIMEOUT_S))
        if tls is not None:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = stack.enter_context(context.wrap_socket(connection))
            if tls.client_auth == "required":
                return 0  # without a client certificate, the node answers only its half of the handshake
        connection.sendall(len(frame).to_bytes(4, "big") + frame)
        answer = _receive(connection, int.from_bytes(_receive(connection, 4, deadline_s), "big"), deadline_s)
    _, position = decode_response_header(ApiKey.API_VERSIONS, 0, answer)
    response, _ = decode(ApiVersionsResponse, 0, answer, position)
    return response.error_code


def _receive(connection: socket.socket, size_bytes: int, deadline_s: float) -> bytes:
    received = bytearray()
    while len(received) < size_bytes:
        # A timeout of 0 would mean that the socket does not block.
        connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        part = connection.recv(min(size_bytes - len(received), 65536))
        if not part:
            raise ProtocolError("the connection was closed")
        received += part
    return bytes(received)


def _decode(given: argparse.Namespace) -> int:
    *named, text = cast("list[str]", given.message)
    try:
        data = bytes_of(sys.stdin.read() if text == "-" else text)
    except ValueError as error:
        return _refuse(str(error))
    if named:
        if len(named) != 2 or not named[1].isdecimal():
            return _refuse("give API, VERSION and BYTES, or a whole request as BYTES alone")
        return _decode_body(named[0], int(named[1]), data, is_response=given.response)
    if given.response:
        return _refuse("a response does not name its API: give API and VERSION")
    return _decode_request(data)


def _decode_request(frame: bytes) -> int:
    """Print the header and the body of a request that begins with its size."""
    if len(frame) < _SIZE_BYTES:
        return _refuse("a request begins with four bytes of size")
    size = int.from_bytes(frame[:_SIZE_BYTES], "big", signed=True)
    request = frame[_SIZE_BYTES : _SIZE_BYTES + max(size, 0)]
    if len(request) != size:
        return _refuse(f"the request is {size} bytes long, and {len(request)} of them are here")
    try:
        header, end = decode_request_header(request)
    except ProtocolError as error:
        return _refuse(str(error))
    print("\n".join(_describe(header._asdict())))
    return _decode_body(str(header.api_key), header.api_version, request[end:])


def _decode_body(api: str, version: int, body: bytes, *, is_response: bool = False) -> int:
    api_key = _find_api(api)
    if api_key is None:
        return _refuse(f"there is no API {api!r}")
    try:
        message_type = response_class(api_key) if is_response else request_class(api_key)
        message, end = parse(message_type, version, body)
    except KeyError:
        return _refuse(f"{api_key.name} is not declared")
    except (ValueError, ProtocolError) as error:
        print(f"sluice: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_FAILED
    print("\n".join(_describe(message)))
    if end != len(body):
        print(f"sluice: {len(body) - end} bytes are left over", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _refuse(text: str) -> int:
    print(f"sluice: {text}", file=sys.stderr)
    return EXIT_REFUSED


def _find_api(text: str) -> ApiKey | None:
    wanted = text.replace("_", "").lower()
    for api_key in ApiKey:
        if wanted in (str(int(api_key)), api_key.name.replace("_", "").lower()):
            return api_key
    return None


def _describe(value: object, name: str = "", depth: int = 0) -> list[str]:
    """Return a message as indented lines, one per field."""
    indent = "  " * depth
    label = f"{indent}{name}: " if name else indent
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        return [line for field, held in fields.items() for line in _describe(held, field, depth)]
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
