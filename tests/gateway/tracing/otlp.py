"""A collector of traces: an HTTP server that reads OTLP with the message definitions of OpenTelemetry."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status


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


def read_request(encoded: bytes) -> ExportTraceServiceRequest:
    """Return one OTLP request. Raise AssertionError if it has a field that OpenTelemetry's definitions lack."""
    request = ExportTraceServiceRequest.FromString(encoded)
    whole = request.ByteSize()
    request.DiscardUnknownFields()
    assert request.ByteSize() == whole
    return request


def read_spans(encoded: bytes) -> list[Received]:
    """Return the spans of one OTLP request."""
    return [
        Received(
            name=span.name,
            kind=span.kind,
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            trace_id=span.trace_id,
            span_id=span.span_id,
            attributes=_attributes(span.attributes),
            resource=_attributes(of_resource.resource.attributes),
            error=span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None,
        )
        for of_resource in read_request(encoded).resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def _attributes(listed: Sequence[KeyValue]) -> dict[str, str | int]:
    found = {each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value") for each in listed}
    assert len(found) == len(listed), "OTLP allows one attribute of a name"
    return found


@dataclass
class Collector:
    """A running collector. It responds with `status`, and keeps the spans that it accepted."""

    url: str
    status: int = 200
    spans: list[Received] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Path and headers of every request, in lower case."""


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
