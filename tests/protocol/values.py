"""Seeded values of any declared message, for tests over all messages."""

from __future__ import annotations

from random import Random
from typing import Any
from uuid import UUID

from protocol.messages import declared_messages
from protocol.schema import Field, MessageSchema, struct_schema

MESSAGES = declared_messages()
MESSAGE_VERSIONS = [(schema, version) for schema in MESSAGES for version in schema.versions]
IDS = [f"{schema.struct_type.__name__}-v{version}" for schema, version in MESSAGE_VERSIONS]

INTEGER_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
ALPHABET = "abcdefghijklmnopqrstuvwxyz-._0123456789äß€😀"


def message_value(schema: MessageSchema, version: int, random: Random, *, longest: int = 4) -> Any:
    """Return a message with random values in every field of that version. Fields that the version lacks keep their
    defaults.
    """
    return _struct_value(schema.struct_type, version, random, longest)


def _struct_value(struct_type: type[Any], version: int, random: Random, longest: int) -> Any:
    return struct_type(
        **{
            field.name: _field_value(field, version, random, longest)
            for field in struct_schema(struct_type).fields
            if version in field.versions and not (field.tag is not None and random.random() < 0.5)
        }
    )


def _field_value(field: Field, version: int, random: Random, longest: int) -> Any:
    if version in field.nullable and random.random() < 0.3:
        return None
    if field.is_array:
        count = random.randint(0, longest)
        return tuple(_value(field.kind, version, random, max(1, longest - 1)) for _ in range(count))
    return _value(field.kind, version, random, longest)


def _value(kind: Any, version: int, random: Random, longest: int) -> Any:
    if isinstance(kind, type):
        return _struct_value(kind, version, random, longest)
    match kind.name:
        case "bool":
            return random.random() < 0.5
        case "uuid":
            return UUID(int=random.choice((0, 1, random.getrandbits(128))))
        case "string":
            return "".join(random.choices(ALPHABET, k=_length(random)))
        case "bytes" | "records":
            return random.randbytes(_length(random))
        case "float64":
            return random.choice((0.0, -1.0, 0.1, 1e300, random.random() * 10 ** random.randint(-5, 9)))
        case "uint16":
            return random.choice((0, 1, 2**15, 2**16 - 1, random.getrandbits(16)))
        case name:
            bits = INTEGER_BITS[name]
            edges = (0, 1, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)))
            return random.choice((*edges, random.getrandbits(bits) - 2 ** (bits - 1)))


def _length(random: Random) -> int:
    """Return a random length: mostly short, sometimes close to a length whose varint needs another byte."""
    return random.choice((126, 127, 128)) if random.random() < 0.03 else random.choice((0, 1, 3, 7, 15))
