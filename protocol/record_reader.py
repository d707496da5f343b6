"""The records of a batch whoever sent it, read by aiokafka's compiled parser.

The one idea: the parser is made for brokers' bytes, so it is given what cannot hurt it. Each time it gets a copy of at
most `WINDOW_BYTES` of whole records with zeros behind them, so a varint that is cut off ends in our memory; it holds
the interpreter for a few milliseconds at most, so another thread's event loop goes on; what it cannot bound (a record
larger than a window) is read here, field by field, without copying. Codecs are ours (`protocol/compression.py`), for
the parser's own have no bound.

It judges form and count. Which offsets and timestamps are right is its callers' to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from aiokafka.errors import CorruptRecordException
from aiokafka.record.default_records import DefaultRecordBatch

from protocol.compression import MAX_DECOMPRESSED_BYTES, Compression, decompress
from protocol.errors import ProtocolError
from protocol.records import (
    CODEC_MASK,
    HEAD_BYTES,
    MAGIC,
    MIN_RECORD_BYTES,
    BatchHead,
    Buffer,
    TimestampType,
    encode_head,
    read_head,
)
from protocol.varints import read_zigzag32, read_zigzag64, write_zigzag

WINDOW_BYTES = 64 * 1024
"""What the parser gets at a time: 32,000 empty headers, the costliest bytes there are, take it 4 ms."""

MAX_HEADERS = 65_536
"""Of one record that no window holds; in a window its bytes bound them."""

_ZEROS = bytes(32)
"""Behind the last record; the parser reads at most two varints too far."""


DAMAGED = (ProtocolError, CorruptRecordException, UnicodeDecodeError, OverflowError, MemoryError)
"""What reading a batch may raise: the parser's own errors are not wrapped, which would cost as much as it saves. It
answers a length of 2**62 bytes with one of the last two."""


class ReadRecord(Protocol):
    """What the parser's records and ours have in common. No timestamp is −1."""

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
    """One batch of magic 2. One of `DAMAGED`, at any step, on what is not exactly
    `records_count` well-formed records, or decompresses to more than `max_decompressed_bytes`."""

    def __init__(
        self,
        batch: Buffer,
        head: BatchHead | None = None,
        *,
        max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
        scratch: memoryview | None = None,
    ) -> None:
        """`head` is read if it is not given. With `scratch` (see `decompress`) the body may lie in it, until it is used
        again."""
        head = head or read_head(batch)
        if head.magic != MAGIC:
            raise ProtocolError(f"record batch of magic {head.magic}")
        self.head = head
        payload = memoryview(batch)[HEAD_BYTES : head.size_bytes]
        codec = head.compression
        if codec is not Compression.NONE and (head.records_count or len(payload)):
            payload = memoryview(decompress(codec, payload, max_decompressed_bytes, scratch))
        self.body = payload
        """All records, decompressed."""
        if head.records_count < 0 or head.records_count * MIN_RECORD_BYTES > len(payload):
            raise ProtocolError(f"{head.records_count} records cannot lie in {len(payload)} bytes")

    def windows(self) -> Iterator[Iterable[ReadRecord]]:
        """The records in order, a window at a time. A window is iterated once and makes its records as it goes."""
        total = len(self.body)
        if total <= WINDOW_BYTES:
            yield self._parse(self.body, self.head.records_count)
            return
        left = self.head.records_count
        position = 0
        while left:
            start = position
            position, count = _end_of_window(self.body, start, left)
            if count:
                yield self._parse(self.body[start:position], count)
            else:
                count = 1
                record, position = self._read_large(start)
                yield (record,)
            left -= count
        if position != total:
            raise ProtocolError(f"{total - position} bytes after the last record")

    def _parse(self, window: memoryview, count: int) -> Iterable[ReadRecord]:
        head = self.head
        attributes = head.attributes & ~CODEC_MASK
        if count != head.records_count or attributes != head.attributes:
            head = head._replace(attributes=attributes, records_count=count)
        guarded = memoryview(b"".join((encode_head(head), window, _ZEROS)))
        return DefaultRecordBatch(guarded[: HEAD_BYTES + len(window)])

    def _read_large(self, start: int) -> tuple[LargeRecord, int]:
        """The record at `start`, and where it ends."""
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
        return LargeRecord(head.base_offset + offset_delta, timestamp, key, value), end


def record_spans(body: memoryview) -> Iterator[tuple[int, int]]:
    """Where each record of a body that has been read begins and ends, its length included."""
    position, total = 0, len(body)
    while position < total:
        start = position
        length, position = read_zigzag32(body, position, total)
        position += length
        if length < 0 or position > total:
            raise ProtocolError(f"record of {length} bytes leaves its batch")
        yield start, position


def shift_timestamp(record: memoryview, by_ms: int) -> bytes:
    """One record, as `record_spans` finds it, with its timestamp delta raised."""
    total = len(record)
    _, position = read_zigzag32(record, 0, total)
    attributes = record[position : position + 1]
    delta, position = read_zigzag64(record, position + 1, total)
    fields = b"".join((attributes, write_zigzag(delta + by_ms), record[position:]))
    return write_zigzag(len(fields)) + fields


def _read_bytes(body: memoryview, position: int, end: int) -> tuple[memoryview | None, int]:
    length, position = read_zigzag32(body, position, end)
    if length < 0:
        return None, position
    if position + length > end:
        raise ProtocolError(f"field of {length} bytes leaves its record")
    return body[position : position + length], position + length


def _end_of_window(body: memoryview, start: int, most: int) -> tuple[int, int]:
    """Where the whole records from `start` on end that fit a window, and how many they are, at most `most`; only
    their lengths are looked at. None fit if the first is too large."""
    total = len(body)
    limit = min(start + WINDOW_BYTES, total)
    end = position = start
    count = 0
    while count < most and position < limit:
        byte = body[position]
        if byte < 0x80:
            position += 1 + (byte >> 1)
        elif position + 1 < limit and (second := body[position + 1]) < 0x80:
            position += 2 + ((byte & 0x7F | second << 7) >> 1)
        else:
            raw = shift = 0
            while byte >= 0x80:
                raw |= (byte & 0x7F) << shift
                shift += 7
                position += 1
                if shift > 28 or position >= total:
                    raise ProtocolError("a record's length is cut off")
                byte = body[position]
            position += 1 + ((raw | byte << shift) >> 1)
        if position > limit:
            if position > total:
                raise ProtocolError("a record leaves its batch")
            break
        end = position
        count += 1
    return end, count
