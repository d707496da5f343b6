"""Bytes of keys, values and headers as a person can read them.

The one idea: the bytes decide, and what is shown is bounded and plain data. A page that shows it puts it into text
nodes only. Avro is decoded by a schema that the viewer gives; without one, a value framed for a schema registry shows
its schema id. Protobuf without a schema shows its fields by number.
"""

from __future__ import annotations

import json
import re
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NotRequired, Protocol, TypeAlias, TypedDict, cast

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_SHOWN_BYTES = 4 * 1024
"""Number of bytes of a key or value that a list shows."""
MAX_WHOLE_BYTES = 256 * 1024
"""Number of bytes of a key or value that a page of its own shows."""
HEX_BYTES = 1_024
MAX_SCHEMA_CHARS = 64 * 1024
MAX_DEPTH = 40
MAX_ITEMS = 10_000
_REGISTRY_HEAD_BYTES = 5
_INDEX = re.compile("[0-9]{1,9}")


class DecodeError(Exception):
    """The bytes do not fit the format; the message says where."""


class Shown(TypedDict):
    """A key, value or header in the form in which a page shows it."""

    form: str
    """The form in which the value is shown, or null."""
    text: str | None
    size: int
    """Size in bytes of the whole key, value or header, even if only a part is shown."""
    cut: NotRequired[bool]
    """True if only the first part is shown."""
    schemaId: NotRequired[int]
    why: NotRequired[str]
    """Reason why the value is shown in hex."""


class Declared(Protocol):
    """A schema of a registry."""

    @property
    def form(self) -> str:
        """Form of the values: avro, json or protobuf."""
        ...

    def decode(self, body: bytes) -> Json:
        """Return the value behind the schema's id. Raise DecodeError."""
        ...


Schemas = Callable[[int], Declared]
"""Returns the schema of an id, or raises DecodeError with a sentence that says why it is missing. It may block."""


def shown(
    raw: bytes | None, form: str, schema: Json = None, most: int = MAX_SHOWN_BYTES, schemas: Schemas | None = None
) -> Shown:
    """Return a key or value as `form` shows it: auto, text, json, hex, avro or protobuf. Never fails: bytes that do
    not fit the form are shown in hex, with the reason."""
    if raw is None:
        return {"form": "null", "text": None, "size": 0}
    if form == "auto":
        form = _form_of(raw)
    told: Shown = {"form": form, "text": None, "size": len(raw), "cut": len(raw) > most}
    if (schema_id := _schema_id(raw)) is not None and form in ("avro", "protobuf", "registry"):
        told["schemaId"] = schema_id
    try:
        told["form"], told["text"] = _decoded(raw, form, schema, most, schemas)
    except (DecodeError, ValueError, LookupError, RecursionError, struct.error) as error:
        told["form"], told["text"] = "hex", hexed(raw, HEX_BYTES)
        told["why"] = f"not {form}: {error}"[:200]
    return told


def _decoded(raw: bytes, form: str, schema: Json, most: int, schemas: Schemas | None) -> tuple[str, str]:
    """Return the form in which the bytes are shown, and the text."""
    is_binary = form in ("avro", "protobuf", "registry")
    if is_binary and len(raw) > MAX_WHOLE_BYTES:
        raise DecodeError(f"a value of more than {MAX_WHOLE_BYTES // 1024} KiB is not decoded")
    schema_id = _schema_id(raw) if is_binary else None
    body = raw if schema_id is None else raw[_REGISTRY_HEAD_BYTES:]
    if schema_id is not None and schema is None and schemas is not None:
        declared = schemas(schema_id)
        if declared.form == "json":
            return "json", _cut(_tidied(body.decode(), 2), most)
        return declared.form, _dumped(declared.decode(body), most)
    match form:
        case "json":
            text = raw.decode()
            if len(raw) <= most:
                # A list shows one line for each record.
                indent = 2 if most == MAX_WHOLE_BYTES else None
                text = _tidied(text, indent)
            else:
                text = text[:most]
        case "text":
            text = raw[:most].decode("utf-8", "replace" if len(raw) > most else "strict")
        case "avro" if schema is not None:
            text = _dumped(avro(body, schema), most)
        case "protobuf":
            text = _dumped(protobuf(body if schema_id is None else _after_indexes(body)), most)
        case _:
            text = hexed(raw, min(HEX_BYTES, most))
    return form, text


def _form_of(raw: bytes) -> str:
    if not raw:
        return "text"
    if raw[0] == 0 and len(raw) > _REGISTRY_HEAD_BYTES:
        return "registry"
    head = raw[:1].lstrip()
    try:
        text = raw[:MAX_SHOWN_BYTES].decode()
    except UnicodeDecodeError as error:
        if error.start < min(len(raw), MAX_SHOWN_BYTES) - 4:
            return "hex"
        text = ""
    if any(ord(character) < 32 and character not in "\t\r\n" for character in text):
        return "hex"
    if head in (b"{", b"[") and len(raw) <= MAX_WHOLE_BYTES:
        try:
            json.loads(raw)
        except (ValueError, RecursionError):
            return "text"
        return "json"
    return "text"


def _schema_id(raw: bytes) -> int | None:
    if len(raw) < _REGISTRY_HEAD_BYTES or raw[0] != 0:
        return None
    return int.from_bytes(raw[1:_REGISTRY_HEAD_BYTES], "big")


def hexed(raw: bytes, most: int) -> str:
    """Return a dump of 16 bytes a line: offset, bytes, printable characters."""
    lines: list[str] = []
    for start in range(0, min(len(raw), most), 16):
        piece = raw[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in piece)
        lines.append(f"{start:06x}  {piece.hex(' '):<47}  {text}")
    return "\n".join(lines)


def _tidied(text: str, indent: int | None) -> str:
    """Return JSON with regular white space. Its numbers keep their digits. If an object repeats a name, the text is
    returned as it is."""
    mark, numbers, repeats = secrets.token_hex(8), list[str](), 0

    def kept(number: str) -> str:
        numbers.append(number)
        return f"{mark}{len(numbers) - 1}"

    def named(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        nonlocal repeats
        found = dict(pairs)
        repeats += len(pairs) - len(found)
        return found

    value = json.loads(text, parse_float=kept, object_pairs_hook=named)
    tidied = json.dumps(value, indent=indent, ensure_ascii=False)
    return text if repeats else re.sub(f'"{mark}([0-9]+)"', lambda each: numbers[int(each[1])], tidied)


def _dumped(value: Json, most: int) -> str:
    return _cut(json.dumps(value, indent=2, ensure_ascii=False), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most * 4 else text[: most * 4] + "…"


# --- JSON paths -------------------------------------------------------------------------------------------------------


def at_path(raw: bytes | None, path: Sequence[str]) -> Json:
    """Return the value at a path like ("user", "ids", "0"); None if the value has no such path."""
    if raw is None or len(raw) > MAX_WHOLE_BYTES:
        return None
    try:
        value: Json = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    for step in path:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and _INDEX.fullmatch(step) and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


def parse_path(text: str) -> tuple[str, ...]:
    """Parse `$.user.ids[0]` or `user.ids.0`."""
    return tuple(part for part in text.removeprefix("$").replace("[", ".").replace("]", "").split(".") if part)


# --- Avro -------------------------------------------------------------------------------------------------------------


class Bytes:
    """A byte string with a current position."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at, self.items = raw, 0, 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.raw):
            raise DecodeError(f"the value ends at byte {len(self.raw)}, and {count} more are expected")
        self.at += count
        return self.raw[self.at - count : self.at]

    def rest(self) -> bytes:
        return self.take(len(self.raw) - self.at)

    @property
    def is_at_end(self) -> bool:
        return self.at >= len(self.raw)

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 63:
                raise DecodeError(f"a number at byte {self.at} is too long")

    def zigzag(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def count(self) -> None:
        self.items += 1
        if self.items > MAX_ITEMS:
            raise DecodeError(f"more than {MAX_ITEMS} items")


def avro(raw: bytes, schema: Json, references: Sequence[Json] = ()) -> Json:
    """Return the value of an Avro datum by its writer's schema. `references` are schemas whose names it uses. Raise
    DecodeError."""
    named: _Named = {}
    for each in references:
        if isinstance(each, dict):
            _name(each, named, "")
    return _avro(Bytes(raw), schema, named, "", 0)


_Named: TypeAlias = "dict[str, tuple[dict[str, Json], str]]"
"""Named types by full name, each with its namespace."""


def _name(declared: dict[str, Json], named: _Named, space: str) -> str:
    """Keep a named type by its full name, and return its namespace. `space` is that of the enclosing type."""
    name = str(declared.get("name"))
    own = name.rpartition(".")[0] if "." in name else str(declared.get("namespace", space))
    named[name if "." in name else _full(name, own)] = declared, own
    return own


def _full(name: str, space: str) -> str:
    return f"{space}.{name}" if space and "." not in name else name


def _avro(source: Bytes, schema: Json, named: _Named, space: str, depth: int) -> Json:
    """Read a value. `space` is the namespace in which the schema names types."""
    if depth > MAX_DEPTH:
        raise DecodeError("the schema is too deep")
    source.count()
    if isinstance(schema, list):
        index = source.zigzag()
        if not 0 <= index < len(schema):
            raise DecodeError(f"the union has no branch {index}")
        return _avro(source, schema[index], named, space, depth + 1)
    if isinstance(schema, str):
        known = named.get(_full(schema, space)) or named.get(schema)
        return _primitive(source, schema) if known is None else _avro(source, known[0], named, known[1], depth + 1)
    if not isinstance(schema, dict):
        raise DecodeError("the schema is not an Avro schema")
    return _avro_object(source, schema, named, space, depth)


def _avro_object(source: Bytes, schema: dict[str, Json], named: _Named, space: str, depth: int) -> Json:
    """Read a value of a type whose schema is an object."""
    kind = schema.get("type")
    if kind in ("record", "enum", "fixed"):
        space = _name(schema, named, space)
    match kind:
        case "record" | "error":
            found: dict[str, Json] = {}
            for each in _listed(schema, "fields"):
                if not isinstance(each, dict):
                    raise DecodeError("a field of the schema is no object")
                found[str(each["name"])] = _avro(source, each["type"], named, space, depth + 1)
            return found
        case "enum":
            symbols, index = _listed(schema, "symbols"), source.zigzag()
            if not 0 <= index < len(symbols):
                raise DecodeError(f"the enum has no symbol {index}")
            return symbols[index]
        case "fixed":
            size = schema.get("size", 0)
            return source.take(size if isinstance(size, int) else -1).hex()
        case "array":
            return [_avro(source, schema["items"], named, space, depth + 1) for _ in _blocks(source)]
        case "map":
            return {
                source.take(source.zigzag()).decode(): _avro(source, schema["values"], named, space, depth + 1)
                for _ in _blocks(source)
            }
        case _:
            return _avro(source, kind, named, space, depth + 1)


def _listed(schema: dict[str, Json], name: str) -> list[Json]:
    found = schema.get(name, [])
    if not isinstance(found, list):
        raise DecodeError(f"{name} of the schema is no list")
    return found


def _blocks(source: Bytes) -> Iterator[None]:
    while (count := source.zigzag()) != 0:
        if count < 0:
            source.zigzag()
        for _ in range(abs(count)):
            source.count()
            yield None


def _primitive(source: Bytes, name: str) -> Json:
    match name:
        case "null":
            return None
        case "boolean":
            return source.take(1) != b"\0"
        case "int" | "long":
            return source.zigzag()
        case "float":
            return struct.unpack("<f", source.take(4))[0]
        case "double":
            return struct.unpack("<d", source.take(8))[0]
        case "bytes":
            return source.take(source.zigzag()).hex()
        case "string":
            return source.take(source.zigzag()).decode()
        case _:
            raise DecodeError(f"unknown type {name}")


# --- Protobuf ---------------------------------------------------------------------------------------------------------


def _after_indexes(raw: bytes) -> bytes:
    """Return the message behind the message indexes that a registry's clients write."""
    source = Bytes(raw)
    for _ in range(source.zigzag()):
        source.zigzag()
    return raw[source.at :]


def protobuf(raw: bytes, depth: int = 0, counter: Bytes | None = None) -> dict[str, Json]:
    """Return the fields of a Protobuf message by number, as its wire format tells them. `counter` counts the items of
    the whole value. Raise DecodeError."""
    source, fields = Bytes(raw), dict[str, Json]()
    counter = counter or source
    repeated: set[str] = set()
    while not source.is_at_end:
        counter.count()
        tag = source.varint()
        number, kind = tag >> 3, tag & 7
        if not number:
            raise DecodeError(f"field number 0 at byte {source.at}")
        value = _wire_value(source, kind, depth, counter)
        key = str(number)
        if key in repeated:
            cast("list[Json]", fields[key]).append(value)
        elif key in fields:
            fields[key] = [fields[key], value]
            repeated.add(key)
        else:
            fields[key] = value
    return fields


def _wire_value(source: Bytes, kind: int, depth: int, counter: Bytes) -> Json:
    match kind:
        case 0:
            return source.varint()
        case 1:
            return struct.unpack("<d", source.take(8))[0]
        case 5:
            return struct.unpack("<f", source.take(4))[0]
        case 2:
            piece = source.take(source.varint())
            return _text_or_message(piece, depth, counter)
        case _:
            raise DecodeError(f"unknown wire type {kind} at byte {source.at}")


def _text_or_message(piece: bytes, depth: int, counter: Bytes) -> Json:
    try:
        text = piece.decode()
        if text.isprintable():
            return text
    except UnicodeDecodeError:
        pass  # not text, so it may be a message or bytes
    if piece and depth < MAX_DEPTH:
        try:
            return protobuf(piece, depth + 1, counter)
        except DecodeError:
            pass  # not a message either, so it is shown as bytes
    return piece.hex()
