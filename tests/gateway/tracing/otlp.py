"""A collector of traces: an HTTP server that reads OTLP, with a reader of protobuf that knows OTLP's field numbers.

The reader repeats the numbers of `opentelemetry/proto/**/*.proto` and imports nothing of the program, so that a wrong
number in the program is found.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MESSAGES: dict[str, dict[int, tuple[str, str]]] = {
    "request": {1: ("resource_spans", "resource_spans*")},
    "resource_spans": {1: ("resource", "resource"), 2: ("scope_spans", "scope_spans*")},
    "resource": {1: ("attributes", "attribute*")},
    "scope_spans": {1: ("scope", "scope"), 2: ("spans", "span*")},
    "scope": {1: ("name", "string"), 2: ("version", "string")},
    "span": {
        1: ("trace_id", "bytes"),
        2: ("span_id", "bytes"),
        5: ("name", "string"),
        6: ("kind", "varint"),
        7: ("start_time_unix_nano", "fixed64"),
        8: ("end_time_unix_nano", "fixed64"),
        9: ("attributes", "attribute*"),
        15: ("status", "status"),
    },
    "attribute": {1: ("key", "string"), 2: ("value", "value")},
    "value": {1: ("string", "string"), 3: ("int", "varint")},
    "status": {2: ("message", "string"), 3: ("code", "varint")},
}
"""Name and type of each field by message and number. A star marks a repeated field."""


def read_message(kind: str, encoded: bytes) -> dict[str, Any]:
    """Return a message's fields by name. AssertionError if a field is unknown or has another wire type."""
    found: dict[str, Any] = {}
    position = 0
    while position < len(encoded):
        tag, position = _varint(encoded, position)
        name, type_name = MESSAGES[kind][tag >> 3]
        if type_name == "varint":
            assert tag & 7 == 0
            value, position = _varint(encoded, position)
            found[name] = value - (1 << 64) if value >= 1 << 63 else value
        elif type_name == "fixed64":
            assert tag & 7 == 1
            found[name] = int.from_bytes(encoded[position : position + 8], "little")
            position += 8
        else:
            assert tag & 7 == 2
            size, position = _varint(encoded, position)
            body = encoded[position : position + size]
            assert len(body) == size
            position += size
            if type_name.endswith("*"):
                found.setdefault(name, []).append(read_message(type_name[:-1], body))
            elif type_name == "string":
                found[name] = body.decode()
            else:
                found[name] = body if type_name == "bytes" else read_message(type_name, body)
    return found


def _varint(encoded: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = encoded[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position


@dataclass(frozen=True)
class Received:
    """A span as the collector received it."""

    name: str
    kind: int
    start_ns: int
    end_ns: int
    trace_id: bytes
    span_id: bytes
    attributes: dict[str, str | int]
    resource: dict[str, str | int]
    error: str | None


def read_spans(encoded: bytes) -> list[Received]:
    """Return the spans of one OTLP request."""
    return [
        Received(
            name=span["name"],
            kind=span["kind"],
            start_ns=span["start_time_unix_nano"],
            end_ns=span["end_time_unix_nano"],
            trace_id=span["trace_id"],
            span_id=span["span_id"],
            attributes=_attributes(span.get("attributes", [])),
            resource=_attributes(of_resource["resource"]["attributes"]),
            error=span["status"]["message"] if span.get("status", {}).get("code") == 2 else None,
        )
        for of_resource in read_message("request", encoded)["resource_spans"]
        for of_scope in of_resource["scope_spans"]
        for span in of_scope["spans"]
    ]


def _attributes(listed: list[dict[str, Any]]) -> dict[str, str | int]:
    found = {each["key"]: next(iter(each["value"].values())) for each in listed}
    assert len(found) == len(listed), "OTLP allows one attribute of a name"
    return found


@dataclass
class Collector:
    """A running collector. It answers with `status`, and keeps the spans that it accepted."""

    url: str
    status: int = 200
    spans: list[Received] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Path and headers, in lower case, of every request."""


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    """Run a collector on this host."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            if collector.status == 200:
                collector.spans.extend(read_spans(body))
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
