"""Unsigned varints of KIP-482, and the tagged sections that are skipped with them.

The one idea: five bytes and 32 bits at most, checked against an `end` that no read passes. (Zigzag varints exist only
inside records.)
"""

from __future__ import annotations

from typing import TypeAlias

from protocol.errors import ProtocolError

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_UVARINT = 0xFFFFFFFF

MAX_TAGGED_FIELDS = 127
"""In one section. Upstream defines four at most; each that is not known costs a step of its own."""


def read_uvarint(buffer: Buffer, position: int, end: int) -> tuple[int, int]:
    """Value and the position behind it; raises ProtocolError if torn, longer than five bytes or above 32 bits."""
    value = 0
    for shift in (0, 7, 14, 21, 28):
        if position >= end:
            raise ProtocolError("torn varint")
        byte = buffer[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > MAX_UVARINT:
                break
            return value, position
    raise ProtocolError("varint above 32 bits")


def write_uvarint(value: int) -> bytes:
    """Shortest form; raises ValueError outside 32 bits."""
    if not 0 <= value <= MAX_UVARINT:
        raise ValueError(f"{value} does not fit an unsigned varint")
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def skip_tagged_fields(buffer: Buffer, position: int, end: int) -> int:
    """The position behind a tagged section of which no tag is known; raises ProtocolError if torn."""
    count, position = read_uvarint(buffer, position, end)
    if count > MAX_TAGGED_FIELDS or 2 * count > end - position:
        raise ProtocolError(f"{count} tagged fields in {end - position} bytes")
    for _ in range(count):
        _, position = read_uvarint(buffer, position, end)
        size, position = read_uvarint(buffer, position, end)
        position += size
        if position > end:
            raise ProtocolError("torn tagged field")
    return position
