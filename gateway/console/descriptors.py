"""Protobuf messages with the names of their fields, by the descriptor that a schema registry keeps.

The one idea: a descriptor is a Protobuf message itself (google/protobuf/descriptor.proto), so the reader of wire values
reads it, and no `.proto` text is parsed. Imported files are not read: fields of their types show field numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.console.decode import MAX_DEPTH, Bytes, DecodeError, Json, protobuf

_DOUBLE, _FLOAT, _INT64, _UINT64, _INT32, _FIXED64, _FIXED32, _BOOL, _STRING = range(1, 10)
_GROUP, _MESSAGE, _BYTES, _UINT32, _ENUM, _SFIXED32, _SFIXED64, _SINT32, _SINT64 = range(10, 19)
"""FieldDescriptorProto.Type."""
_REPEATED = 3
"""FieldDescriptorProto.Label."""
_FIXED = {
    _DOUBLE: "<d", _FLOAT: "<f", _FIXED64: "<Q", _FIXED32: "<I", _SFIXED32: "<i", _SFIXED64: "<q",
}  # fmt: skip
_WITH_LENGTH = frozenset({_STRING, _BYTES, _MESSAGE})


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    type: int
    repeated: bool
    type_name: str


@dataclass(frozen=True, slots=True)
class Message:
    fields: Mapping[int, Field]
    is_map_entry: bool


@dataclass(slots=True)
class ProtobufTypes:
    """Types of one file. `top` has its messages in order, `nested` the full names of the messages in a message."""

    form = "protobuf"
    top: list[str] = field(default_factory=list[str])
    nested: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    messages: dict[str, Message] = field(default_factory=dict[str, Message])
    enums: dict[str, dict[int, str]] = field(default_factory=dict[str, dict[int, str]])

    def decode(self, body: bytes) -> Json:
        """Return the message behind the message indexes that a registry's clients write. Raise DecodeError."""
        source = Bytes(body)
        # An empty list of indexes means the first message.
        path = [source.zigzag() for _ in range(min(source.zigzag(), MAX_DEPTH))] or [0]
        names = self.top
        name = ""
        for index in path:
            if not 0 <= index < len(names):
                raise DecodeError(f"the schema has no message {index}")
            name = names[index]
            names = self.nested[name]
        return self._message(name, source.rest(), source, 0)

    def _message(self, name: str, raw: bytes, counter: Bytes, depth: int) -> dict[str, Json]:
        declared = self.messages.get(name)
        if declared is None:
            return protobuf(raw, depth, counter)
        if depth > MAX_DEPTH:
            raise DecodeError("the message is too deep")
        source, found = Bytes(raw), dict[str, Json]()
        while not source.is_at_end:
            counter.count()
            tag = source.varint()
            number, kind = tag >> 3, tag & 7
            each = declared.fields.get(number)
            if each is None:
                _skip(source, kind)
                found[str(number)] = "(not in the schema)"
                continue
            for value in self._values(source, each, kind, counter, depth):
                self._put(found, each, value)
        return found

    def _put(self, found: dict[str, Json], each: Field, value: Json) -> None:
        entry = self.messages.get(each.type_name)
        if entry is not None and entry.is_map_entry and isinstance(value, dict):
            pairs = found.setdefault(each.name, {})
            if isinstance(pairs, dict):
                pairs[str(value.get("key", ""))] = value.get("value")
        elif each.repeated:
            listed = found.setdefault(each.name, [])
            if isinstance(listed, list):
                listed.append(value)
        else:
            found[each.name] = value

    def _values(self, source: Bytes, each: Field, kind: int, counter: Bytes, depth: int) -> Iterator[Json]:
        if kind == 2 and each.type not in _WITH_LENGTH:
            packed = Bytes(source.take(source.varint()))
            while not packed.is_at_end:
                counter.count()
                yield self._scalar(packed, each)
        elif kind == 2:
            piece = source.take(source.varint())
            match each.type:
                case 9:
                    yield piece.decode()
                case 12:
                    yield piece.hex()
                case _:
                    yield self._message(each.type_name, piece, counter, depth + 1)
        elif each.type in _WITH_LENGTH or each.type == _GROUP:
            raise DecodeError(f"field {each.name} has wire type {kind}")
        else:
            yield self._scalar(source, each)

    def _scalar(self, source: Bytes, each: Field) -> Json:
        if (form := _FIXED.get(each.type)) is not None:
            (fixed,) = struct.unpack(form, source.take(struct.calcsize(form)))
            return float(fixed) if each.type in (_DOUBLE, _FLOAT) else int(fixed)
        if each.type in (_SINT32, _SINT64):
            return source.zigzag()
        value = source.varint()
        if each.type == _BOOL:
            return value != 0
        if each.type == _ENUM:
            return self.enums.get(each.type_name, {}).get(value, value)
        # A negative int32 or int64 takes ten bytes, as a number of 64 bits.
        return value - (1 << 64) if each.type in (_INT32, _INT64) and value >= 1 << 63 else value


def read_descriptor(raw: bytes) -> ProtobufTypes:
    """Return the types of a FileDescriptorProto. Raise DecodeError, UnicodeDecodeError or ValueError."""
    types, file = ProtobufTypes(), _pieces(raw)
    package = _text(file, 2)
    scope = f".{package}" if package else ""
    for piece in _parts(file, 4):
        types.top.append(_add_message(types, scope, piece, 0))
    for piece in _parts(file, 5):
        _add_enum(types, scope, piece)
    if not types.top:
        raise DecodeError("the descriptor has no message")
    return types


def _add_message(types: ProtobufTypes, scope: str, raw: bytes, depth: int) -> str:
    if depth > MAX_DEPTH:
        raise DecodeError("the schema is too deep")
    parts = _pieces(raw)
    name = f"{scope}.{_text(parts, 1)}"
    fields: dict[int, Field] = {}
    for piece in _parts(parts, 2):
        each = _pieces(piece)
        fields[_number(each, 3)] = Field(
            _text(each, 1), _number(each, 5), _number(each, 4) == _REPEATED, _text(each, 6)
        )
    is_map_entry = any(_number(_pieces(options), 7) for options in _parts(parts, 7))
    types.messages[name] = Message(fields, is_map_entry)
    types.nested[name] = [_add_message(types, name, piece, depth + 1) for piece in _parts(parts, 3)]
    for piece in _parts(parts, 4):
        _add_enum(types, name, piece)
    return name


def _add_enum(types: ProtobufTypes, scope: str, raw: bytes) -> None:
    parts = _pieces(raw)
    values = [_pieces(piece) for piece in _parts(parts, 2)]
    types.enums[f"{scope}.{_text(parts, 1)}"] = {_number(value, 2): _text(value, 1) for value in values}


Pieces = Mapping[int, Sequence[int | bytes]]


def _pieces(raw: bytes) -> Pieces:
    """Return the wire values of a message by field number."""
    source = Bytes(raw)
    found: dict[int, list[int | bytes]] = {}
    while not source.is_at_end:
        tag = source.varint()
        value = _skip(source, tag & 7)
        found.setdefault(tag >> 3, []).append(value)
    return found


def _skip(source: Bytes, kind: int) -> int | bytes:
    """Return the next wire value, numbers of fixed size as bytes."""
    match kind:
        case 0:
            return source.varint()
        case 1:
            return source.take(8)
        case 2:
            return source.take(source.varint())
        case 5:
            return source.take(4)
        case _:
            raise DecodeError(f"unknown wire type {kind}")


def _parts(pieces: Pieces, number: int) -> list[bytes]:
    return [each for each in pieces.get(number, ()) if isinstance(each, bytes)]


def _text(pieces: Pieces, number: int) -> str:
    return next((each.decode() for each in reversed(_parts(pieces, number))), "")


def _number(pieces: Pieces, number: int) -> int:
    return next((each for each in reversed(pieces.get(number, ())) if isinstance(each, int)), 0)
