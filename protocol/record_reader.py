"""The records of a batch from any sender, read by aiokafka's compiled parser.

The one idea: the parser is made for brokers' bytes, so we give it only input that cannot hurt it. Each time it gets a
copy of at most `WINDOW_BYTES` of whole records with zeros behind them, so a varint that is cut off ends in our memory.
It holds the interpreter for a few milliseconds at most, so another thread's event loop goes on. A record larger than a
window, whose cost the parser cannot bound, is read here, field by field, without copying. All windows of a batch are
copied to the same place, where their records are counted, too. Codecs are ours (`protocol/compression.py`), because the
parser's own have no bound.

It judges form and count. Its callers judge offsets and timestamps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch

from protocol.compression import MAX_DECOMPRESSED_BYTES, decompress
from protocol.errors import ProtocolError
from protocol.records import (
    ATTRIBUTES_LOW_AT,
    CODEC_MASK,
    HEAD_BYTES,
    MAGIC,
    MIN_RECORD_BYTES,
    BatchHead,
    Buffer,
    TimestampType,
    read_head,
)
from protocol.varints import read_zigzag32, read_zigzag64, to_int64, write_zigzag

WINDOW_BYTES = 64 * 1024
"""Maximal number of bytes that the parser gets at a time. Even 32,000 empty headers, the costliest content, take only 4
ms.
"""

WINDOW_RECORDS = 1_000
"""Maximal number of records that the parser gets at a time. The caller reads so many without a pause in a quarter of a
millisecond.
"""

MAX_HEADERS = 65_536
"""Limit for one record larger than a window. In a window the number of bytes limits the headers."""

_ZEROS = bytes(32)
"""Zeros after the last record. The parser reads at most two varints too far."""

_COUNT = struct.Struct(">i")

_ENDS = tuple(1 + (byte >> 1) if byte < 0x80 else 2 + ((byte & 0x7F) >> 1) for byte in range(256))
"""Number of bytes after which a record ends, by its first byte. If that is the first of two length bytes, the second
adds 64 times itself."""


DAMAGED = (ProtocolError, CorruptRecordException, UnicodeDecodeError, OverflowError, MemoryError)
"""Exceptions that reading a batch may raise. The parser's own errors are not wrapped, which would cost as much as
the parser saves. It answers a length of 2**62 bytes with one of the last two."""


class ReadRecord(Protocol):
    """Attributes that the parser's records and ours have in common. No timestamp is −1."""

    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def key(self) -> Buffer | None: ...
    @property
    def value(self) -> Buffer | None: ...


@dataclass(frozen=True, slots=True)
class LargeRecord:
    """A record that no window holds: key and value are views of the body. Its headers were walked and not kept."""

    offset: int
    timestamp: int
    key: memoryview | None
    value: memoryview | None


class RecordReader:
    """Reads one batch of magic 2. Any step raises one of `DAMAGED` if the batch is not exactly `records_count`
    well-formed records, or decompresses to more than `max_decompressed_bytes`."""

    def __init__(
        self,
        batch: Buffer,
        head: BatchHead | None = None,
        *,
        max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
        scratch: memoryview | None = None,
    ) -> None:
        """Read the header from the batch if `head` is not given. With `scratch` (see `decompress`), the records may be
        in `scratch` until it is used again.
        """
        head = head or read_head(batch)
        if head.magic != MAGIC:
            raise ProtocolError(f"record batch of magic {head.magic}")
        self.head = head
        self._window_head: Buffer = memoryview(batch)[:HEAD_BYTES]
        payload = memoryview(batch)[HEAD_BYTES : head.size_bytes]
        if head.attributes & CODEC_MASK:
            codec = head.compression
            if head.records_count or len(payload):
                payload = memoryview(decompress(codec, payload, max_decompressed_bytes, scratch))
            self._window_head = _without_codec(self._window_head)
        self.body = payload
        """Bytes of all records, decompressed."""
        if head.records_count < 0 or head.records_count * MIN_RECORD_BYTES > len(payload):
            raise ProtocolError(f"{head.records_count} records cannot lie in {len(payload)} bytes")

    def windows(self) -> Iterator[Iterable[ReadRecord]]:
        """Iterate over the records in order, a window at a time.

        A window makes its records lazily: iterate over it once, and before asking for the next.
        """
        total, left = len(self.body), self.head.records_count
        if total <= WINDOW_BYTES and left <= WINDOW_RECORDS:
            yield DefaultRecordBatch(memoryview(b"".join((self._window_head, self.body, _ZEROS)))[: HEAD_BYTES + total])
            return
        copied = bytearray(HEAD_BYTES + WINDOW_BYTES + len(_ZEROS))
        copied[:HEAD_BYTES] = self._window_head
        place = memoryview(copied)
        position = 0
        while left:
            size = min(WINDOW_BYTES, total - position)
            place[HEAD_BYTES : HEAD_BYTES + size] = self.body[position : position + size]
            end, count = _whole_records(copied, HEAD_BYTES, HEAD_BYTES + size, min(left, WINDOW_RECORDS))
            if count:
                place[end : end + len(_ZEROS)] = _ZEROS
                _COUNT.pack_into(copied, HEAD_BYTES - _COUNT.size, count)
                yield DefaultRecordBatch(place[:end])
                position += end - HEAD_BYTES
            else:
                count = 1
                record, position = self._read_large(position)
                yield (record,)
            left -= count
        if position != total:
            raise ProtocolError(f"{total - position} bytes after the last record")

    def _read_large(self, start: int) -> tuple[LargeRecord, int]:
        """Return the record at `start`, and the position at which it ends."""
        head, body = self.head, self.body
        length, position = read_zigzag32(body, start, len(body))
        end = position + length
        if length < 0 or end > len(body):
            raise ProtocolError(f"record of {length} bytes leaves its batch")
        timestamp_delta, position = read_zigzag64(body, position + 1, end)
        offset_delta, position = read_zigzag32(body, position, end)
        key, position = _read_bytes(body, position, end)
        value, position = _read_bytes(body, position, end)
        header_count, position = read_zigzag32(body, position, end)
        if not 0 <= header_count <= MAX_HEADERS:
            raise ProtocolError(f"a record with {header_count} headers")
        for _ in range(header_count):
            name, position = _read_bytes(body, position, end)
            if name is None:
                raise ProtocolError("null header key")
            try:
                str(name, "utf-8")
            except UnicodeDecodeError as error:
                raise ProtocolError("header key is not UTF-8") from error
            _, position = _read_bytes(body, position, end)
        if position != end:
            raise ProtocolError(f"{end - position} bytes after the last field of a record")
        timestamp = head.base_timestamp + timestamp_delta
        if head.timestamp_type is TimestampType.LOG_APPEND_TIME:
            timestamp = head.max_timestamp
        if head.delete_horizon_ms is not None:
            timestamp = to_int64(timestamp)
        if not -(2**63) <= timestamp < 2**63:
            raise ProtocolError(f"timestamp {timestamp} has more than 64 bits")
        return LargeRecord(head.base_offset + offset_delta, timestamp, key, value), end


def _without_codec(head: Buffer) -> bytearray:
    """Return the header of the same batch without compression. Its length and CRC are then wrong, but the parser does
    not read them.
    """
    plain = bytearray(head)
    plain[ATTRIBUTES_LOW_AT] &= ~CODEC_MASK
    return plain


def record_spans(body: memoryview) -> Iterator[tuple[int, int]]:
    """Iterate over the begin and end of each record of a body that has been read, its length included."""
    position, total = 0, len(body)
    while position < total:
        start = position
        length, position = read_zigzag32(body, position, total)
        position += length
        if length < 0 or position > total:
            raise ProtocolError(f"record of {length} bytes leaves its batch")
        yield start, position


def shift_timestamp(record: memoryview, by_ms: int) -> bytes:
    """Return one record, as `record_spans` yields it, with `by_ms` added to its timestamp delta.

    A delta to a delete horizon may overflow. Readers then add it with an overflow, as Kafka does.
    """
    total = len(record)
    _, position = read_zigzag32(record, 0, total)
    attributes = record[position : position + 1]
    delta, position = read_zigzag64(record, position + 1, total)
    fields = b"".join((attributes, write_zigzag(to_int64(delta + by_ms)), record[position:]))
    return write_zigzag(len(fields)) + fields


def _read_bytes(body: memoryview, position: int, end: int) -> tuple[memoryview | None, int]:
    length, position = read_zigzag32(body, position, end)
    if length < 0:
        return None, position
    if position + length > end:
        raise ProtocolError(f"field of {length} bytes leaves its record")
    return body[position : position + length], position + length


def _whole_records(window: bytearray, start: int, limit: int, most: int) -> tuple[int, int]:
    """Return where the last whole record between `start` and `limit` ends, and how many such records there are, at most
    `most`.

    Only their lengths are read. It does not check whether a record leaves the batch.
    """
    position, count = _alike(window, start, limit, most)
    for number in range(count, most):
        # If a length is read at the limit or behind it, the record ends behind the limit.
        length = window[position]
        if length < 0x80:
            end = position + _ENDS[length]
        elif (second := window[position + 1]) < 0x80:
            end = position + _ENDS[length] + (second << 6)
        else:
            length, end = _long_length(window, position, limit)
            end += length
        if end > limit:
            return position, number
        position = end
    return position, most


def _alike(window: bytearray, start: int, limit: int, most: int) -> tuple[int, int]:
    """Do the same as `_whole_records` for consecutive records with the same length in one or two bytes.

    It finds them by looking at every n-th byte, which takes a tenth of the time of looking at each record by itself.
    """
    if start + 2 > limit:
        return start, 0
    first, second = window[start], window[start + 1]
    size = _ENDS[first] if first < 0x80 else _ENDS[first] + (second << 6)
    count = min((limit - start) // size, most)
    if first < 0x80:
        count = _run(window[start : start + count * size : size], first)
    elif second < 0x80:
        count = _run(window[start : start + count * size : size], first)
        count = _run(window[start + 1 : start + count * size : size], second)
    else:
        count = 0
    return start + count * size, count


def _run(found: bytearray, byte: int) -> int:
    """Return how many times `byte` is repeated at the beginning."""
    return len(found) - len(found.lstrip(bytes((byte,))))


def _long_length(window: bytearray, position: int, limit: int) -> tuple[int, int]:
    """Return a record's length that takes three or more bytes, and the position after these bytes. If the length is cut
    off or negative, return a length that no window holds."""
    try:
        length, position = read_zigzag32(window, position, limit)
    except ProtocolError:
        return WINDOW_BYTES, position
    return (length if length >= 0 else WINDOW_BYTES), position
