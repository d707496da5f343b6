"""Values of Protobuf as JSON, by the types of their schema.

The one idea: the JSON has each field under its own name, and numbers as numbers, so that it can be typed as any JSON.
Fields that the schema lacks make a value unreadable, because its JSON would lose them. Every length is checked before
it is used. A value may yield at most `MAX_PARTS` pieces of JSON, because a few bytes may expand to many default values.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from json import JSONEncoder
from math import isfinite

from pipeline.archive.protobuf.types import Field, Types

MAX_DEPTH = 100
"""Maximal depth of messages within messages, as in Protobuf's own libraries."""
MAX_PARTS = 1_000_000
MAX_TEXT_CHARACTERS = 16 * 1024 * 1024
"""Maximal length of a value's JSON. Spark cannot hold a longer variant."""
MAX_INDEXES = 32
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_WELL_KNOWN = "google.protobuf."
_EPOCH = datetime(1970, 1, 1)
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799
_NANOS = 10**9
WRAPPED = ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
"""Names, without the suffix `Value`, of the messages whose only field is a scalar."""
# Between these limits, a float is exactly represented by its shortest decimal text without an exponent.
_LEAST_PLAIN, _MOST_PLAIN = 1e-3, 1e7
_quoted = JSONEncoder(ensure_ascii=False).encode


class UnreadableError(ValueError):
    """The value is not of its type. The message says why."""


def read_indexes(raw: bytes) -> tuple[list[int], int]:
    """Return the path of indexes that a registry's serializer writes before a message, and their length in bytes.

    A single zero means the first message. Raise UnreadableError if the value ends within the path.
    """
    count, at = _zigzag(raw, 0)
    if not 0 <= count <= MAX_INDEXES:
        raise UnreadableError(f"it names a message by {count} indexes")
    path: list[int] = []
    for _ in range(count):
        index, at = _zigzag(raw, at)
        path.append(index)
    return path or [0], at


class Decoder:
    """Decodes values of one schema. `parts` and `characters` limit the JSON of a value."""

    def __init__(self, types: Types, parts: int = MAX_PARTS, characters: int = MAX_TEXT_CHARACTERS) -> None:
        self._types, self._parts, self._characters = types, parts, characters
        self._plans: dict[str, _Plan] = {}
        self._left = 0

    def json(self, raw: bytes) -> str:
        """Return the JSON of the bytes after a schema's id: message indexes, then a message. Raise UnreadableError."""
        path, at = read_indexes(raw)
        name = self._types.at(path)
        if name is None:
            raise UnreadableError(f"the schema has no message at the indexes {path}")
        self._left = self._parts
        text = self._message(name, raw[at:], 0)
        if len(text) > self._characters:
            raise UnreadableError(f"its JSON is longer than {self._characters:,} characters")
        return text

    def _message(self, name: str, raw: bytes, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise UnreadableError(f"more than {MAX_DEPTH} messages lie within each other")
        texts = self._texts(name, raw, depth)
        if name.startswith(_WELL_KNOWN):
            special = _SPECIAL.get(name.removeprefix(_WELL_KNOWN))
            if special is not None:
                return special(texts)
        return "{" + ",".join(f'"{key}":{text}' for key, text in texts.items()) + "}"

    def _texts(self, name: str, raw: bytes, depth: int) -> dict[str, str]:
        """Return the fields of a message by name, as JSON, with the defaults of absent ones."""
        plan = self._plan(name)
        self._spend(len(plan.slots))
        held = _Held()
        at = 0
        while at < len(raw):
            tag, at = _varint(raw, at)
            slot = plan.by_number.get(tag >> 3)
            if slot is None:
                raise UnreadableError(f"it has a field {tag >> 3}, which {name} lacks")
            content, at = _content(raw, at, tag & 7)
            self._put(held, slot, tag & 7, content, depth)
        found: dict[str, str] = {}
        for slot in plan.slots:
            text = self._text(held, slot, depth)
            if text is not None:
                found[slot.field.name] = text
        return found

    def _put(self, held: _Held, slot: _Slot, wire: int, content: int | bytes, depth: int) -> None:
        self._spend(1)
        number = slot.field.number
        if wire == _LENGTH and slot.wire != _LENGTH and slot.field.repeated and isinstance(content, bytes):
            texts, at = held.texts.setdefault(number, []), 0
            while at < len(content):
                item, at = _content(content, at, slot.wire)
                self._spend(1)
                texts.append(slot.convert(item))
            return
        if wire != slot.wire:
            raise UnreadableError(f"its field {slot.field.name} has the wire type {wire}")
        for other in slot.siblings:
            held.texts.pop(other, None)
            held.messages.pop(other, None)
        if slot.field.kind == "map" and isinstance(content, bytes):
            entry = self._texts(slot.field.type_name, content, depth + 1)
            key = entry["key"]
            held.maps.setdefault(number, {})[key if key.startswith('"') else f'"{key}"'] = entry["value"]
        elif slot.field.kind == "message" and isinstance(content, bytes):
            held.messages.setdefault(number, []).append(content)
        elif slot.field.repeated:
            held.texts.setdefault(number, []).append(slot.convert(content))
        else:
            held.texts[number] = [slot.convert(content)]

    def _text(self, held: _Held, slot: _Slot, depth: int) -> str | None:
        """Return a field as JSON, None if it is absent and has no default."""
        number, declared = slot.field.number, slot.field
        if declared.kind == "map":
            members = [f"{key}:{value}" for key, value in held.maps.get(number, {}).items()]
            return "{" + ",".join(members) + "}" if members else None
        if declared.kind == "message":
            pieces = held.messages.get(number, [])
            if declared.repeated:
                return _listed([self._message(declared.type_name, each, depth + 1) for each in pieces])
            # A message whose field occurs several times is the merge of all occurrences.
            if pieces or slot.default is not None:
                return self._message(declared.type_name, b"".join(pieces), depth + 1)
        elif declared.repeated:
            return _listed(held.texts.get(number, []))
        elif number in held.texts:
            return held.texts[number][0]
        elif slot.default is not None:
            return slot.default
        if declared.presence == "required":
            raise UnreadableError(f"it lacks the required field {declared.name}")
        return None

    def _plan(self, name: str) -> _Plan:
        found = self._plans.get(name)
        if found is None:
            declared = self._types.messages[name].fields
            slots = tuple(self._slot(each, declared, is_entry=name.endswith(">")) for each in declared)
            found = self._plans[name] = _Plan(slots, {each.field.number: each for each in slots})
        return found

    def _slot(self, each: Field, declared: tuple[Field, ...], *, is_entry: bool) -> _Slot:
        siblings = tuple(
            other.number for other in declared if each.oneof and other.oneof == each.oneof and other is not each
        )
        if each.kind in ("message", "map"):
            # An entry of a map always has a value, even if the entry's bytes are empty.
            default = "" if is_entry else None
            return _Slot(each, _LENGTH, _nothing, default, siblings)
        if each.kind == "enum":
            names = {number: f'"{symbol}"' for number, symbol in self._types.enums[each.type_name].items()}
            wire, convert, default = _VARINT, _Enum(names), names.get(0, "0")
        else:
            wire, convert, default = _SCALARS[each.kind]
        return _Slot(each, wire, convert, default if each.presence == "implicit" else None, siblings)

    def _spend(self, parts: int) -> None:
        self._left -= parts
        if self._left < 0:
            raise UnreadableError(f"it has more than {self._parts:,} fields and elements")


@dataclass(slots=True)
class _Held:
    """The fields of a message that were read so far, by number: JSON of scalars, bytes of messages, JSON of maps."""

    texts: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    messages: dict[int, list[bytes]] = field(default_factory=dict[int, list[bytes]])
    maps: dict[int, dict[str, str]] = field(default_factory=dict[int, dict[str, str]])


_Convert = Callable[[int | bytes], str]


@dataclass(frozen=True, slots=True)
class _Slot:
    field: Field
    wire: int
    convert: _Convert
    default: str | None
    siblings: tuple[int, ...]
    """Numbers of the other fields of the same oneof."""


@dataclass(frozen=True, slots=True)
class _Plan:
    slots: tuple[_Slot, ...]
    by_number: Mapping[int, _Slot]


@dataclass(frozen=True, slots=True)
class _Enum:
    names: Mapping[int, str]

    def __call__(self, content: int | bytes) -> str:
        number = _signed(content, 32)
        return self.names.get(number, str(number))


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(raw):
            raise UnreadableError("it ends within a number")
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
        if shift > 63:
            raise UnreadableError("it has a number of more than ten bytes")


def _zigzag(raw: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(raw, at)
    return _unfolded(value), at


def _unfolded(value: int) -> int:
    return (value >> 1) ^ -(value & 1)


def _content(raw: bytes, at: int, wire: int) -> tuple[int | bytes, int]:
    if wire == _VARINT:
        return _varint(raw, at)
    if wire == _LENGTH:
        size, at = _varint(raw, at)
    elif wire == _FIXED64:
        size = 8
    elif wire == _FIXED32:
        size = 4
    else:
        raise UnreadableError(f"it has the wire type {wire}")
    if size > len(raw) - at:
        raise UnreadableError("it ends within a field")
    return raw[at : at + size], at + size


def _number(content: int | bytes) -> int:
    if not isinstance(content, int):
        raise UnreadableError("it has bytes in place of a number")
    return content


def _bytes(content: int | bytes) -> bytes:
    if isinstance(content, int):
        raise UnreadableError("it has a number in place of bytes")
    return content


def _signed(content: int | bytes, bits: int) -> int:
    value = _number(content) & ((1 << bits) - 1)
    return value - (1 << bits) if value >> (bits - 1) else value


def _unpacked(form: str) -> _Convert:
    return lambda content: str(struct.unpack(form, _bytes(content))[0])


def _nothing(content: int | bytes) -> str:
    raise UnreadableError(f"{content!r} is no message")


def _double(content: int | bytes) -> str:
    (number,) = struct.unpack("<d", _bytes(content))
    return repr(number) if isfinite(number) else _infinite(number)


def _float(content: int | bytes) -> str:
    """Return the shortest decimal number that identifies this float. If that needs an exponent,
    return the exact value.
    """
    raw = _bytes(content)
    (number,) = struct.unpack("<f", raw)
    if not isfinite(number):
        return _infinite(number)
    if number and not _LEAST_PLAIN <= abs(number) < _MOST_PLAIN:
        return f"{number:.16e}"
    shortest = (float(f"{number:.{digits}g}") for digits in range(6, 10))
    return repr(next(each for each in shortest if struct.pack("<f", each) == raw))


def _infinite(number: float) -> str:
    return '"NaN"' if number != number else '"Infinity"' if number > 0 else '"-Infinity"'


def _string(content: int | bytes) -> str:
    try:
        return _quoted(_bytes(content).decode())
    except UnicodeDecodeError as error:
        raise UnreadableError("it has a text that is not UTF-8") from error


def _base64(content: int | bytes) -> str:
    return f'"{b64encode(_bytes(content)).decode()}"'


_SCALARS: Mapping[str, tuple[int, _Convert, str]] = {
    "double": (_FIXED64, _double, "0.0"),
    "float": (_FIXED32, _float, "0.0"),
    "int32": (_VARINT, lambda content: str(_signed(content, 32)), "0"),
    "int64": (_VARINT, lambda content: str(_signed(content, 64)), "0"),
    "uint32": (_VARINT, lambda content: str(_number(content) & 0xFFFF_FFFF), "0"),
    "uint64": (_VARINT, lambda content: str(_number(content)), "0"),
    "sint32": (_VARINT, lambda content: str(_unfolded(_number(content) & 0xFFFF_FFFF)), "0"),
    "sint64": (_VARINT, lambda content: str(_unfolded(_number(content))), "0"),
    "fixed32": (_FIXED32, _unpacked("<I"), "0"),
    "fixed64": (_FIXED64, _unpacked("<Q"), "0"),
    "sfixed32": (_FIXED32, _unpacked("<i"), "0"),
    "sfixed64": (_FIXED64, _unpacked("<q"), "0"),
    "bool": (_VARINT, lambda content: "true" if content else "false", "false"),
    "string": (_LENGTH, _string, '""'),
    "bytes": (_LENGTH, _base64, '""'),
}
"""Wire type, JSON and default of each scalar."""


def _timestamp(texts: Mapping[str, str]) -> str:
    seconds, nanos = int(texts["seconds"]), int(texts["nanos"])
    if not _FIRST_SECOND <= seconds <= _LAST_SECOND or not 0 <= nanos < _NANOS:
        # No timestamp column can hold this value, so the value is rescued.
        return f'{{"seconds":{seconds},"nanos":{nanos}}}'
    return f'"{(_EPOCH + timedelta(seconds=seconds)).isoformat()}{_fraction(nanos)}Z"'


def _duration(texts: Mapping[str, str]) -> str:
    nanos = int(texts["seconds"]) * _NANOS + int(texts["nanos"])
    seconds, rest = divmod(abs(nanos), _NANOS)
    return f'"{"-" if nanos < 0 else ""}{seconds}{_fraction(rest)}s"'


def _listed(texts: list[str]) -> str | None:
    """Return a list, None if it is empty, because an absent list is the same value."""
    return "[" + ",".join(texts) + "]" if texts else None


def _fraction(nanos: int) -> str:
    return f".{nanos:09d}".rstrip("0") if nanos else ""


def _kind(texts: Mapping[str, str]) -> str:
    name, text = next(iter(texts.items()), ("null_value", "null"))
    return "null" if name == "null_value" else text


_SPECIAL: Mapping[str, Callable[[Mapping[str, str]], str]] = {
    "Timestamp": _timestamp,
    "Duration": _duration,
    "Value": _kind,
    "Struct": lambda texts: texts.get("fields", "{}"),
    "ListValue": lambda texts: texts.get("values", "[]"),
    **dict.fromkeys((f"{name}Value" for name in WRAPPED), lambda texts: texts["value"]),
}
"""JSON of the well-known types that have a form of their own, from the JSON of their fields."""
