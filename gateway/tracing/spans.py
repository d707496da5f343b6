"""Spans as values, and their bytes in OpenTelemetry's protocol (OTLP 1.x, `ExportTraceServiceRequest`).

The one idea: a node reports finished work, so a span is a tuple that is made once, when the work is over. OTLP is
protobuf with few kinds of fields, and all of them are written here. So a node needs no OpenTelemetry package (decision
0024). Field numbers are those of `opentelemetry/proto/trace/v1/trace.proto` and its neighbours.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

SCOPE = "sluice"
"""Name of the instrumentation that made the spans."""

_BYTES, _FIXED64, _VARINT = 2, 1, 0
_STATUS_ERROR = 2
_UINT64 = 0xFFFF_FFFF_FFFF_FFFF

Attributes = Sequence[tuple[str, str | int]]


class Kind(IntEnum):
    """Values of OTLP's `SpanKind`."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class Span(NamedTuple):
    """One finished piece of work. Times are nanoseconds since 1970."""

    name: str
    kind: Kind
    start_ns: int
    end_ns: int
    attributes: Attributes
    error: str | None = None
    """The reason of a failure; None: the work succeeded."""


def encode_spans(spans: Iterable[Span], resource: Attributes, version: str) -> bytes:
    """Return the body of an OTLP request with these spans. Each span begins a trace of its own. `resource` describes
    the node, `version` is the program's."""
    scope = _field(1, SCOPE.encode()) + _field(2, version.encode())
    scope_spans = _field(1, scope) + b"".join(_field(2, _span(span)) for span in spans)
    resource_spans = _field(1, _attributes(1, resource)) + _field(2, scope_spans)
    return _field(1, resource_spans)


def _span(span: Span) -> bytes:
    parts = [
        _field(1, _random_id(16)),
        _field(2, _random_id(8)),
        _field(5, span.name.encode()),
        _varint_field(6, span.kind),
        _fixed64_field(7, span.start_ns),
        _fixed64_field(8, max(span.start_ns, span.end_ns)),
        _attributes(9, span.attributes),
    ]
    if span.error is not None:
        status = _field(2, span.error.encode()) + _varint_field(3, _STATUS_ERROR)
        parts.append(_field(15, status))
    return b"".join(parts)


def _random_id(size: int) -> bytes:
    """Return an id that is not all zeros, which OTLP refuses."""
    return b"\1" + secrets.token_bytes(size - 1)


def _attributes(number: int, attributes: Attributes) -> bytes:
    return b"".join(_field(number, _field(1, name.encode()) + _field(2, _value(value))) for name, value in attributes)


def _value(value: str | int) -> bytes:
    return _field(1, value.encode()) if isinstance(value, str) else _varint_field(3, value)


def _field(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(body)) + body


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _fixed64_field(number: int, value: int) -> bytes:
    return _varint(number << 3 | _FIXED64) + value.to_bytes(8, "little")


def _varint(value: int) -> bytes:
    """Return protobuf's varint. A negative number takes ten bytes, as its 64 bits say."""
    value &= _UINT64
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
