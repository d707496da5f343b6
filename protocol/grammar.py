"""A message at one version as a `construct` grammar: the readable reference of what is on the wire.

The one idea: the grammar is derived from the declaration, one tree per message and version, and everything else about
bytes is derived from the grammar: `sluice decode` and the tests parse and build with it, and `specialise` walks the
same tree to write the functions that the server runs. So its constructs have the properties that this walk needs as
plain attributes. It has the bounds of those functions, except the bound on all elements of a request, and accepts the
same bytes. It is slow, so no served request uses it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, BinaryIO, TypeVar, cast
from uuid import UUID

from construct import (
    Construct,
    ConstructError,
    Float64b,
    FormatField,
    Int8sb,
    Int16sb,
    Int16ub,
    Int32sb,
    Int64sb,
    IntegerError,
    RangeError,
    Renamed,
    StreamError,
    ValidationError,
)

from protocol import schema
from protocol.buffer import Buffer
from protocol.errors import ProtocolError
from protocol.schema import Field, StructSchema, message_schema, struct_schema
from protocol.varints import MAX_TAGGED_FIELDS, MAX_UVARINT, write_uvarint

M = TypeVar("M")

UUID_BYTES = 16

MAX_STRING_BYTES = 0x7FFF
"""The longest string. The length of a plain string has sixteen bits, and Kafka reads no longer compact string either.
`bytes` and records have no such bound. The bound also holds for text in which U+FFFD has replaced bytes, because no
answer could repeat a longer one."""

MAX_ARRAY_ELEMENTS = 1_000_000
"""The largest count that is read of one array, in requests and responses, as in Kafka 4.4."""


def _remaining(stream: BinaryIO) -> int:
    position = stream.tell()
    end = stream.seek(0, io.SEEK_END)
    stream.seek(position)
    return end - position


def _read(stream: BinaryIO, byte_count: int, path: str) -> bytes:
    if byte_count > _remaining(stream):
        raise StreamError(f"{byte_count} bytes of {_remaining(stream)}", path)
    return stream.read(byte_count)


def _take(piece: Construct, stream: BinaryIO, path: str) -> Any:
    return piece._parse(stream, None, path)


def _put(piece: Construct, value: Any, stream: BinaryIO, path: str) -> None:
    piece._build(value, stream, None, path)


class UnsignedVarint(Construct):
    """An unsigned varint: at most five bytes and 32 bits, the lowest seven bits first."""

    min_bytes = 1

    def _parse(self, stream: BinaryIO, context: Any, path: str) -> int:
        value = 0
        for shift in range(0, 35, 7):
            byte = _read(stream, 1, path)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value > MAX_UVARINT:
                    break
                return value
        raise IntegerError("varint above 32 bits", path)

    def _build(self, obj: int, stream: BinaryIO, context: Any, path: str) -> None:
        stream.write(write_uvarint(obj))


_uvarint = UnsignedVarint()


class Length(Construct):
    """A length or count; None for null. The compact form is an unsigned varint of the length plus one. The plain form
    is an integer, -1 for null."""

    def __init__(self, plain: FormatField, *, compact: bool, nullable: bool) -> None:
        super().__init__()
        self.plain = plain
        self.compact = compact
        self.nullable = nullable
        self.min_bytes = 1 if compact else plain.length

    def _parse(self, stream: BinaryIO, context: Any, path: str) -> int | None:
        length: int = _take(_uvarint, stream, path) - 1 if self.compact else _take(self.plain, stream, path)
        if length >= 0:
            return length
        if length == -1 and self.nullable:
            return None
        raise RangeError(f"length {length}", path)

    def _build(self, obj: int | None, stream: BinaryIO, context: Any, path: str) -> None:
        if obj is None and not self.nullable:
            raise ValidationError("None in a field that is not nullable", path)
        length = -1 if obj is None else obj
        if self.compact:
            _put(_uvarint, length + 1, stream, path)
        else:
            _put(self.plain, length, stream, path)


class Flag(Construct):
    """A boolean in one byte. Every byte but zero is true."""

    min_bytes = 1

    def _parse(self, stream: BinaryIO, context: Any, path: str) -> bool:
        return _read(stream, 1, path) != b"\0"

    def _build(self, obj: bool, stream: BinaryIO, context: Any, path: str) -> None:
        stream.write(bytes((obj,)))


class Uuid(Construct):
    """A UUID in sixteen bytes."""

    min_bytes = UUID_BYTES

    def _parse(self, stream: BinaryIO, context: Any, path: str) -> UUID:
        return UUID(bytes=_read(stream, UUID_BYTES, path))

    def _build(self, obj: UUID, stream: BinaryIO, context: Any, path: str) -> None:
        stream.write(obj.bytes)


class Octets(Construct):
    """Bytes after their length."""

    def __init__(self, length: Length) -> None:
        super().__init__()
        self.length = length
        self.min_bytes = length.min_bytes

    def _parse(self, stream: BinaryIO, context: Any, path: str) -> Any:
        length = _take(self.length, stream, path)
        return None if length is None else _read(stream, length, path)

    def _build(self, obj: Any, stream: BinaryIO, context: Any, path: str) -> None:
        _put(self.length, None if obj is None else len(obj), stream, path)
        stream.write(b"" if obj is None else obj)


def has_grown_long(octets: Buffer) -> bool:
    """Return True if these bytes, read as text, take more than `MAX_STRING_BYTES`. Each byte that is not UTF-8 becomes
    a character of three bytes."""
    return len(octets) > MAX_STRING_BYTES // 3 and len(str(octets, "utf-8", "replace").encode()) > MAX_STRING_BYTES


class Text(Octets):
    """A UTF-8 string after its length in bytes. Invalid bytes become U+FFFD."""

    def _parse(self, stream: BinaryIO, context: Any, path: str) -> str | None:
        length = _take(self.length, stream, path)
        if length is None:
            return None
        if length > MAX_STRING_BYTES:
            raise RangeError(f"a string of {length} bytes", path)
        octets = _read(stream, length, path)
        if has_grown_long(octets):
            raise RangeError(f"a string that is not UTF-8, of {length} bytes", path)
        return octets.decode(errors="replace")

    def _build(self, obj: str | None, stream: BinaryIO, context: Any, path: str) -> None:
        super()._build(None if obj is None else obj.encode(), stream, context, path)


class Records(Octets):
    """Record batches, opaque; built from one piece or from a tuple of chunks."""

    def _build(self, obj: Any, stream: BinaryIO, context: Any, path: str) -> None:
        super()._build(b"".join(cast("tuple[Buffer]", obj)) if isinstance(obj, tuple) else obj, stream, context, path)


class Array(Construct):
    """An array: its elements after their count. The count is checked before the first element is read."""

    def __init__(self, count: Length, element: Construct) -> None:
        super().__init__()
        self.count = count
        self.element = element
        self.min_bytes = count.min_bytes
        if min_bytes(element) < 1:
            raise TypeError("a count of elements that take no bytes cannot be bounded")

    def _parse(self, stream: BinaryIO, context: Any, path: str) -> tuple[Any, ...] | None:
        count = _take(self.count, stream, path)
        if count is None:
            return None
        if count > MAX_ARRAY_ELEMENTS:
            raise RangeError(f"an array of {count} elements", path)
        if count * min_bytes(self.element) > _remaining(stream):
            raise RangeError(f"{count} elements in {_remaining(stream)} bytes", path)
        return tuple([_take(self.element, stream, path) for _ in range(count)])

    def _build(self, obj: Any, stream: BinaryIO, context: Any, path: str) -> None:
        _put(self.count, None if obj is None else len(obj), stream, path)
        for element in obj or ():
            _put(self.element, element, stream, path)


class Optional(Construct):
    """A struct that may be null. A byte precedes it, negative for null."""

    def __init__(self, present: Record) -> None:
        super().__init__()
        self.present = present
        self.min_bytes = 1

    def _parse(self, stream: BinaryIO, context: Any, path: str) -> Any:
        return None if _take(Int8sb, stream, path) < 0 else _take(self.present, stream, path)

    def _build(self, obj: Any, stream: BinaryIO, context: Any, path: str) -> None:
        _put(Int8sb, -1 if obj is None else 1, stream, path)
        if obj is not None:
            _put(self.present, obj, stream, path)


@dataclass(frozen=True, slots=True)
class TaggedField:
    subcon: Renamed
    default: Any

    def differs(self, value: Any) -> bool:
        """Return whether the value must be written. Any empty sequence equals the empty tuple."""
        return (tuple(value) if self.default == () else value) != self.default


class TaggedSection(Construct):
    """Tagged fields, each after its tag and its size (KIP-482). Unknown tags are skipped. If a tag is repeated, its
    last field counts."""

    min_bytes = 1

    def __init__(self, fields: Mapping[int, TaggedField]) -> None:
        super().__init__()
        self.fields = fields

    def _parse(self, stream: BinaryIO, context: Any, path: str) -> dict[str, Any]:
        values = {field.subcon.name: field.default for field in self.fields.values()}
        count = _take(_uvarint, stream, path)
        if count > MAX_TAGGED_FIELDS or 2 * count > _remaining(stream):
            raise RangeError(f"{count} tagged fields in {_remaining(stream)} bytes", path)
        for _ in range(count):
            tag = _take(_uvarint, stream, path)
            section = io.BytesIO(_read(stream, _take(_uvarint, stream, path), path))
            field = self.fields.get(tag)
            if field is not None:
                values[field.subcon.name] = _take(field.subcon, section, path)
                if _remaining(section):
                    raise RangeError(f"{_remaining(section)} bytes too many in tag {tag}", path)
        return values

    def _build(self, obj: Any, stream: BinaryIO, context: Any, path: str) -> None:
        written = {tag: field for tag, field in self.fields.items() if field.differs(getattr(obj, field.subcon.name))}
        _put(_uvarint, len(written), stream, path)
        for tag, field in written.items():
            section = io.BytesIO()
            _put(field.subcon, getattr(obj, field.subcon.name), section, path)
            _put(_uvarint, tag, stream, path)
            _put(_uvarint, len(section.getvalue()), stream, path)
            stream.write(section.getvalue())


class Record(Construct):
    """A struct or message: its fields in order, then its tagged section if the version is flexible."""

    def __init__(
        self,
        struct_type: type[Any],
        subcons: tuple[Renamed, ...],
        absent: Mapping[str, Any],
        tagged: TaggedSection | None,
    ) -> None:
        super().__init__()
        self.struct_type = struct_type
        self.subcons = subcons
        self.absent = absent
        """Fields that the version lacks. They are never written; reading sets them to their defaults."""
        self.tagged = tagged
        self.min_bytes = sum(min_bytes(subcon.subcon) for subcon in subcons) + (0 if tagged is None else 1)

    def _parse(self, stream: BinaryIO, context: Any, path: str) -> Any:
        values = dict(self.absent)
        for subcon in self.subcons:
            values[subcon.name] = _take(subcon, stream, path)
        if self.tagged is not None:
            values |= _take(self.tagged, stream, path)
        return self.struct_type(**values)

    def _build(self, obj: Any, stream: BinaryIO, context: Any, path: str) -> None:
        for subcon in self.subcons:
            _put(subcon, getattr(obj, subcon.name), stream, path)
        if self.tagged is not None:
            _put(self.tagged, obj, stream, path)


def min_bytes(piece: Construct) -> int:
    """Return the minimal number of bytes that a construct of a grammar needs."""
    return piece.length if isinstance(piece, FormatField) else cast("Any", piece).min_bytes


_numbers: Mapping[str, FormatField] = {
    schema.int8.name: Int8sb,
    schema.int16.name: Int16sb,
    schema.int32.name: Int32sb,
    schema.int64.name: Int64sb,
    schema.float64.name: Float64b,
    schema.uint16.name: Int16ub,
}


@cache
def grammar(message_type: type[Any], version: int) -> Record:
    """Return the grammar of a message at a version. Raise ValueError if the message has no such version."""
    message = message_schema(message_type)
    if version not in message.versions:
        raise ValueError(f"{message_type.__name__} has no version {version}")
    return _record(message, version, compact=version in message.flexible)


@cache
def struct_grammar(struct_type: type[Any], version: int, *, flexible: bool) -> Record:
    """Return the grammar of a struct that is not part of a message."""
    return _record(struct_schema(struct_type), version, compact=flexible)


def _record(declared: StructSchema, version: int, *, compact: bool) -> Record:
    present = [field for field in declared.fields if version in field.versions]
    tagged = {
        field.tag: TaggedField(field.name / _field(field, version, compact=compact), field.default)
        for field in sorted(present, key=lambda field: field.tag or 0)
        if field.tag is not None
    }
    return Record(
        declared.struct_type,
        tuple(field.name / _field(field, version, compact=compact) for field in present if field.tag is None),
        {field.name: field.default for field in declared.fields if version not in field.versions},
        TaggedSection(tagged) if compact else None,
    )


def _field(field: Field, version: int, *, compact: bool) -> Construct:
    nullable = version in field.nullable
    if not field.is_array:
        return _value(field, version, compact=compact, nullable=nullable)
    element = _value(field, version, compact=compact, nullable=False)
    return Array(Length(Int32sb, compact=compact, nullable=nullable), element)


def _value(field: Field, version: int, *, compact: bool, nullable: bool) -> Construct:
    kind = field.kind
    if isinstance(kind, type):
        record = _record(struct_schema(kind), version, compact=compact)
        return Optional(record) if nullable else record
    match kind.name:
        case schema.string.name:
            return Text(Length(Int16sb, compact=compact, nullable=nullable))
        case schema.binary.name:
            return Octets(Length(Int32sb, compact=compact, nullable=nullable))
        case schema.records.name:
            return Records(Length(Int32sb, compact=compact, nullable=nullable))
        case schema.uuid.name:
            return Uuid()
        case schema.boolean.name:
            return Flag()
        case name:
            return _numbers[name]


def parse(message_type: type[M], version: int, buffer: Buffer) -> tuple[M, int]:
    """Return the message that the buffer begins with, and the position at which it ends. Raise ProtocolError if the
    bytes are no message.
    """
    stream = io.BytesIO(buffer)
    try:
        return grammar(message_type, version).parse_stream(stream), stream.tell()
    except ConstructError as error:
        raise ProtocolError(f"{message_type.__name__} v{version}: {error}") from error


def build(message: Any, version: int) -> bytes:
    """Build a message's bytes. Raise ValueError if the wire format cannot hold a value."""
    message_type: type[Any] = message.__class__
    stream = io.BytesIO()
    try:
        grammar(message_type, version).build_stream(message, stream)
    except (ConstructError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{message_type.__name__} v{version}: {error}") from error
    return stream.getvalue()
