"""The codecs of record batches: the records section to and from gzip, snappy, lz4 and zstd.

The one idea: output goes to a buffer that grows up to a limit. So memory use depends on the actual data and never on
the size that a header claims. Snappy has two framings, and both are read. This module does not know batches and their
headers.
"""

from __future__ import annotations

import mmap
import struct
from enum import IntEnum
from typing import cast

import cramjam

from protocol.buffer import Buffer
from protocol.errors import ProtocolError

MAX_DECOMPRESSED_BYTES = 128 * 1024 * 1024
"""Default limit on the decompressed size of one batch, as protection against decompression bombs."""

_LENGTH = struct.Struct(">i")

_LZ4_HEAD = bytes.fromhex("04224d18604082")
"""Header of an lz4 frame of independent blocks of 64 KiB, without sizes and checksums. Java and librdkafka write such
frames.
"""
_LZ4_BLOCK_BYTES = 64 * 1024
_LZ4_AS_IT_IS = 1 << 31
_LZ4_LENGTH = struct.Struct("<I")
_LZ4_MAGIC = _LZ4_HEAD[:4]
_LZ4_FIXED_FLAGS, _LZ4_FLAGS = 0xE3, 0x60
"""Flags of a frame that every client reads: version 1, independent blocks, no dictionary."""
_LZ4_BLOCK_CHECKSUM, _LZ4_CONTENT_SIZE, _LZ4_CONTENT_CHECKSUM = 0x10, 0x08, 0x04

_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEAD_BYTES = 16
_XERIAL_VERSION = 1
"""Java refuses an earlier version of the framing."""
_XERIAL_BLOCK_BYTES = 32 * 1024
_SNAPPY_LENGTH_BYTES = 5
_FIRST_OUTPUT_BYTES = 64 * 1024
_MAPPED_FROM_BYTES = 4 * 1024 * 1024


class DecompressedTooLargeError(ProtocolError):
    """Error: the bytes are well-formed as far as they were read, but longer than the caller allows."""


class Compression(IntEnum):
    """Attribute bits 0-2 of a record batch."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


_SNAPPY, _LZ4 = Compression.SNAPPY, Compression.LZ4
"""Python 3.11 takes a fifth of a microsecond for each look-up of an enumeration's member, so these two are looked up
once."""

_DECOMPRESS_INTO = {
    Compression.GZIP: cramjam.gzip.decompress_into,
    Compression.LZ4: cramjam.lz4.decompress_into,
    Compression.ZSTD: cramjam.zstd.decompress_into,
}


def decompress(
    codec: Compression, payload: Buffer, max_bytes: int = MAX_DECOMPRESSED_BYTES, scratch: memoryview | None = None
) -> Buffer:
    """Return the decompressed records section of a batch. Raise ProtocolError if it is damaged or holds more than
    `max_bytes`.

    If `scratch` is given, it has at least `max_bytes`, and the result lies in it. Memory that was written before costs
    no page faults, and there is no second try with a larger buffer.

    Snappy is read in xerial's framing (Java, most clients) and raw (librdkafka's habit). Other threads can run all the
    time: the codecs release the interpreter's lock, and no other code here fills or copies a large block.
    """
    if not codec:
        return payload
    if codec is _SNAPPY:
        return _decompress_snappy(memoryview(payload), max_bytes, scratch)
    into = _DECOMPRESS_INTO[codec]
    size = max_bytes if scratch is not None else min(max(_FIRST_OUTPUT_BYTES, 4 * len(payload)), max_bytes)
    while True:
        output = room(size, scratch)
        if codec is _LZ4 and (blocks := _lz4_blocks(memoryview(payload), output)) is not None:
            return blocks
        try:
            written = into(payload, output)
        except cramjam.DecompressionError as error:
            # Only this message means that the output is full. All others mean that the input is damaged.
            if "failed to write whole buffer" not in str(error):
                raise ProtocolError(f"damaged {codec.name.lower()} records: {error}") from error
            if size >= max_bytes:
                raise DecompressedTooLargeError(f"records decompress to more than {max_bytes} bytes") from error
            size = min(size * 8, max_bytes)
        else:
            return output[:written]


def room(size: int, scratch: memoryview | None = None) -> memoryview:
    """Return memory for `size` bytes. A bytearray is zeroed under the interpreter's lock, half a millisecond per
    megabyte. The kernel zeroes the pages of a mapping one by one as the codec reaches them."""
    if scratch is not None:
        return scratch[:size]
    if size <= _MAPPED_FROM_BYTES:
        return memoryview(bytearray(size))
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _lz4_blocks(payload: memoryview, output: memoryview) -> memoryview | None:
    """Decode a usual frame block by block, because the codec's decoder of frames allocates buffers for each frame.
    Return None if the frame is unusual, damaged or too large: the caller then uses that decoder."""
    if bytes(payload[: len(_LZ4_HEAD)]) != _LZ4_HEAD:
        return None
    position, written, end = len(_LZ4_HEAD), 0, len(payload)
    while position + _LZ4_LENGTH.size <= end:
        (length,) = cast("tuple[int]", _LZ4_LENGTH.unpack_from(payload, position))
        position += _LZ4_LENGTH.size
        if not length:
            return output[:written] if position == end else None
        size = length & ~_LZ4_AS_IT_IS
        if not 0 < size <= min(_LZ4_BLOCK_BYTES, end - position):
            return None
        block, position = payload[position : position + size], position + size
        left = output[written : written + _LZ4_BLOCK_BYTES]
        if length & _LZ4_AS_IT_IS:
            if size > len(left):
                return None
            left[:size] = block
            written += size
            continue
        try:
            written += cramjam.lz4.decompress_block_into(block, left, output_len=len(left))
        except cramjam.DecompressionError:
            return None
    return None


def stream_fault(codec: Compression, payload: memoryview) -> str | None:
    """Return the reason why Java's clients cannot read a records section that the codecs here can read."""
    if codec is _LZ4:
        return _lz4_fault(payload)
    if codec is _SNAPPY and bytes(payload[: len(_XERIAL_MAGIC)]) == _XERIAL_MAGIC:
        version = int.from_bytes(payload[len(_XERIAL_MAGIC) :][: _LENGTH.size], "big", signed=True)
        if version < _XERIAL_VERSION:
            return f"the snappy stream of the records has version {version}"
    return None


def _lz4_fault(payload: memoryview) -> str | None:
    """Check for what Java reads: one frame, and only independent blocks (KIP-57)."""
    flags = payload[len(_LZ4_MAGIC)] if len(payload) >= len(_LZ4_HEAD) else 0
    if bytes(payload[: len(_LZ4_MAGIC)]) != _LZ4_MAGIC or flags & _LZ4_FIXED_FLAGS != _LZ4_FLAGS:
        return "the records are not an lz4 frame of independent blocks"
    position = len(_LZ4_HEAD) + (8 if flags & _LZ4_CONTENT_SIZE else 0)
    while position + _LZ4_LENGTH.size <= len(payload):
        (length,) = cast("tuple[int]", _LZ4_LENGTH.unpack_from(payload, position))
        position += _LZ4_LENGTH.size
        if not length:
            position += 4 if flags & _LZ4_CONTENT_CHECKSUM else 0
            break
        position += (length & ~_LZ4_AS_IT_IS) + (4 if flags & _LZ4_BLOCK_CHECKSUM else 0)
    return "bytes follow the lz4 frame of the records" if position < len(payload) else None


def _decompress_snappy(payload: memoryview, max_bytes: int, scratch: memoryview | None) -> memoryview:
    blocks = _xerial_blocks(payload) if bytes(payload[: len(_XERIAL_MAGIC)]) == _XERIAL_MAGIC else (payload,)
    lengths = [_claimed_bytes(block) for block in blocks]
    total = sum(lengths)
    if total > max_bytes:
        raise DecompressedTooLargeError(f"records decompress to more than {max_bytes} bytes")
    output = room(total, scratch)
    position = 0
    for block, length in zip(blocks, lengths, strict=True):
        end = position + length
        try:
            written = cramjam.snappy.decompress_raw_into(block, output[position:end])
        except cramjam.DecompressionError as error:
            raise ProtocolError(f"damaged snappy records: {error}") from error
        if written != length:
            raise ProtocolError(f"snappy block claims {length} bytes and holds {written}")
        position = end
    return output


def _xerial_blocks(payload: memoryview) -> list[memoryview]:
    if len(payload) < _XERIAL_HEAD_BYTES:
        raise ProtocolError("snappy stream ends inside its head")
    blocks: list[memoryview] = []
    position = _XERIAL_HEAD_BYTES
    while position < len(payload):
        if len(payload) - position < 4:
            raise ProtocolError("snappy stream ends inside a block length")
        (length,) = cast("tuple[int]", _LENGTH.unpack_from(payload, position))
        position += 4
        if not 0 < length <= len(payload) - position:
            raise ProtocolError(f"snappy block of {length} bytes leaves its stream")
        blocks.append(payload[position : position + length])
        position += length
    return blocks


def _claimed_bytes(block: memoryview) -> int:
    """Read the length that a snappy block begins with, a varint.

    The codec is not used for this, because it releases the interpreter's lock, and getting the lock back may take half
    a millisecond.
    """
    claimed = 0
    for index, byte in enumerate(block[:_SNAPPY_LENGTH_BYTES]):
        claimed |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            break
    else:
        raise ProtocolError("damaged snappy records: the length has no end")
    # Snappy's densest element makes 64 bytes from 3. A larger claim is false, and is refused before memory is
    # allocated.
    if claimed > 22 * len(block):
        raise ProtocolError(f"snappy block of {len(block)} bytes claims {claimed}")
    return claimed


def compress(codec: Compression, body: Buffer, level: int | None = None) -> Buffer:
    """Compress the records section with `codec`, in the framing that every Kafka client reads (xerial for snappy).

    `level` is the codec's own; None is its default, and the only one for snappy. Other threads run during the
    compression.
    """
    match codec:
        case Compression.NONE:
            return body
        case Compression.GZIP:
            return memoryview(cramjam.gzip.compress(body, level=level))
        case Compression.LZ4:
            return _compress_lz4(body, level)
        case Compression.ZSTD:
            return memoryview(cramjam.zstd.compress(body, level=level))
        case Compression.SNAPPY:
            return _compress_snappy(body)


def _compress_lz4(body: Buffer, level: int | None) -> bytearray:
    """Return a frame like Java's. Java reads only independent blocks, and the codec's blocks depend on each other. So
    the codec makes a frame of each block, and the blocks of these frames become one frame.
    """
    view = memoryview(body)
    frame = bytearray(_LZ4_HEAD)
    for start in range(0, len(view), _LZ4_BLOCK_BYTES):
        made = memoryview(cramjam.lz4.compress(view[start : start + _LZ4_BLOCK_BYTES], level=level))
        block = made[len(_LZ4_HEAD) :]
        (length,) = cast("tuple[int]", _LZ4_LENGTH.unpack_from(block))
        frame += block[: _LZ4_LENGTH.size + (length & ~_LZ4_AS_IT_IS)]
    frame += bytes(_LZ4_LENGTH.size)
    return frame


def _compress_snappy(body: Buffer) -> bytearray:
    view = memoryview(body)
    stream = bytearray(_XERIAL_MAGIC + struct.pack(">ii", _XERIAL_VERSION, _XERIAL_VERSION))
    for start in range(0, len(view), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(view[start : start + _XERIAL_BLOCK_BYTES]))
        stream += _LENGTH.pack(len(block))
        stream += block
    return stream
