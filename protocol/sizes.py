"""Cost of encoding a message, computed from its value: its weight, and the number of its bytes.

The one idea: both walks follow the declarations. `outweighs` runs for every answer and stops at its limit, so it skips
everything of a fixed size. `encoded_bytes` runs for heavy answers only, before their bytes are made.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from protocol import schema
from protocol.schema import struct_schema
from protocol.specialise import ELEMENT_BYTES, EncodedElements

BINARY_ELEMENT_BYTES = 16 * ELEMENT_BYTES
"""Bytes that are copied as they are and weigh as much as one element."""

_FIXED_BYTES = {
    schema.boolean.name: 1,
    schema.int8.name: 1,
    schema.int16.name: 2,
    schema.uint16.name: 2,
    schema.int32.name: 4,
    schema.int64.name: 8,
    schema.float64.name: 8,
    schema.uuid.name: 16,
}
_TEXT_BYTES, _BINARY_BYTES, _COUNT_BYTES, _TAG_BYTES = 3, 5, 5, 7
"""Largest number of bytes in front of a string, of bytes, of an array, and of a tagged field."""
_NULL_BYTES = 4

_TEXT, _BINARY, _STRUCT, _OTHER = "text", "binary", "struct", "other"


def outweighs(message: Any, limit: int) -> bool:
    """Return whether a message has more than `limit` elements, at any depth, with its long strings: each
    `ELEMENT_BYTES` of a string count as an element.

    It stops counting there.
    """
    return _weight(message, limit) > limit


def _weight(value: Any, limit: int) -> int:
    weight = 0
    for name, is_array, kind in _weighed(value.__class__):
        held = getattr(value, name)
        if held is None:
            continue
        if not is_array:
            if kind is _STRUCT:
                weight += _weight(held, limit - weight)
            elif len(held) >= ELEMENT_BYTES:
                weight += len(held) // (ELEMENT_BYTES if kind is _TEXT else BINARY_ELEMENT_BYTES)
        elif held.__class__ is tuple:
            weight += len(held)
            if kind is _TEXT and weight <= limit:
                weight += sum(map(len, held)) // ELEMENT_BYTES
            elif kind is _STRUCT:
                for element in held:
                    if weight > limit:
                        return weight
                    weight += _weight(element, limit - weight)
    return weight


@cache
def _weighed(struct_type: type[Any]) -> tuple[tuple[str, bool, str], ...]:
    """Return the fields that may be long: the name, whether it is an array, and the type of its elements."""
    found: list[tuple[str, bool, str]] = []
    for field in struct_schema(struct_type).fields:
        kind = _kind_of(field.kind)
        if kind is _STRUCT and not field.is_array and not _weighed(_struct_of(field.kind)):
            continue
        if kind is not _OTHER or field.is_array:
            if kind is _STRUCT and not _weighed(_struct_of(field.kind)):
                kind = _OTHER
            found.append((field.name, field.is_array, kind))
    return tuple(found)


def encoded_bytes(message: Any) -> int:
    """Return the largest number of bytes that encoding makes, not counting `records`, which are sent as they are."""
    total, fields = _shape(message.__class__)
    for name, is_array, kind, width in fields:
        held = getattr(message, name)
        if held is None:
            total += _NULL_BYTES
        elif held.__class__ is EncodedElements:
            total += sum(map(len, held))
        elif kind is _OTHER:
            total += width * len(held)
        else:
            size_of = encoded_bytes if kind is _STRUCT else _octets
            total += sum(map(size_of, held)) if is_array else size_of(held)
    return total


def _octets(value: Any) -> int:
    if isinstance(value, str):
        return _TEXT_BYTES + len(value if value.isascii() else value.encode())
    return _BINARY_BYTES + len(value)


@cache
def _shape(struct_type: type[Any]) -> tuple[int, tuple[tuple[str, bool, str, int], ...]]:
    """Return the bytes that every value of the struct takes, and the fields whose bytes depend on the value.

    Each field is given by its name, whether it is an array, its element type, and the width of one element.
    """
    fixed, varying = 1, list[tuple[str, bool, str, int]]()
    for field in struct_schema(struct_type).fields:
        kind = _kind_of(field.kind)
        fixed += _TAG_BYTES if field.tag is not None else 0
        width = 0 if isinstance(field.kind, type) else _FIXED_BYTES.get(field.kind.name, 0)
        if field.is_array:
            fixed += _COUNT_BYTES
            varying.append((field.name, True, kind, width))
        elif kind is _OTHER:
            fixed += width or _COUNT_BYTES
        else:
            # A struct that may be null has a byte in front.
            fixed += kind is _STRUCT
            varying.append((field.name, False, kind, width))
    return fixed, tuple(varying)


def _kind_of(kind: schema.Kind[Any] | type[Any]) -> str:
    if isinstance(kind, type):
        return _STRUCT
    return {schema.string.name: _TEXT, schema.binary.name: _BINARY}.get(kind.name, _OTHER)


def _struct_of(kind: schema.Kind[Any] | type[Any]) -> type[Any]:
    assert isinstance(kind, type)
    return kind
