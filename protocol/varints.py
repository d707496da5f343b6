"""Varints: unsigned ones of KIP-482 with the tagged sections that are skipped with them, and the records' zigzag ones.

The one idea: each kind of varint has a maximal number of bytes and bits, and no read passes `end`.
"""

from __future__ import annotations

from protocol.buffer import Buffer
from protocol.errors import ProtocolError

MAX_UVARINT = 0xFFFFFFFF

MAX_TAGGED_FIELDS = 127
"""Limit for one section. Upstream defines four tagged fields at most, and each unknown field costs a step."""


def read_uvarint(buffer: Buffer, position: int, end: int) -> tuple[int, int]:
    """Return the value, and the position after it. Raise ProtocolError if the varint is torn, longer than five bytes,
    or above 32 bits."""
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
    """Encode the value in the shortest form. Raise ValueError if it does not fit 32 bits."""
    if not 0 <= value <= MAX_UVARINT:
        raise ValueError(f"{value} does not fit an unsigned varint")
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def skip_tagged_fields(buffer: Buffer, position: int, end: int) -> int:
    """Return the position after a section of tagged fields, none of which is known. Raise ProtocolError if it is
    torn."""
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


def read_zigzag32(buffer: Buffer, position: int, end: int) -> tuple[int, int]:
    """Return a record's int32 (zigzag, at most five bytes), and the position after it. Raise ProtocolError if it is
    torn."""
    if position < end and (byte := buffer[position]) < 0x80:
        return (byte >> 1) ^ -(byte & 1), position + 1
    return _read_zigzag(buffer, position, end, 32)


def read_zigzag64(buffer: Buffer, position: int, end: int) -> tuple[int, int]:
    """Return a record's int64 (zigzag, at most ten bytes), and the position after it. Raise ProtocolError if it is
    torn."""
    return _read_zigzag(buffer, position, end, 64)


def write_zigzag(value: int) -> bytes:
    """Encode a record's int32 or int64 in zigzag form."""
    raw = value << 1 if value >= 0 else (-value << 1) - 1
    encoded = bytearray()
    while raw > 0x7F:
        encoded.append(raw & 0x7F | 0x80)
        raw >>= 7
    encoded.append(raw)
    return bytes(encoded)


def to_int64(value: int) -> int:
    """Return the signed 64 bits of a number, as a sum or difference overflows in Java and C."""
    return (value + 2**63) % 2**64 - 2**63


def _read_zigzag(buffer: Buffer, position: int, end: int, bits: int) -> tuple[int, int]:
    raw = 0
    shift = 0
    while True:
        if position >= end:
            raise ProtocolError("record ends inside a varint")
        byte = buffer[position]
        position += 1
        raw |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
        if shift >= bits:
            raise ProtocolError(f"varint of more than {bits} bits")
    if raw >> bits:
        raise ProtocolError(f"varint of more than {bits} bits")
    return (raw >> 1) ^ -(raw & 1), position
