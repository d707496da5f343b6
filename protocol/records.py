"""Record batches, magic 2: a view of the 61-byte head, the CRC, and (where a feature asks for it) the records inside.

The one idea: bytes stay bytes. Appending needs only the head; `iter_records` and `build_batch` exist for the few places
that must look inside (compaction, null keys on a compacted topic, offsets by timestamp, ends of transactions, tests).
Base offset and leader epoch lie outside the CRC, so an append never touches a covered byte; only `set_log_append_time`
and `correct_max_timestamp` do, and recompute.

It does not read magic 0 or 1, does not convert between codecs (`protocol/compression.py` has them), and verifies a CRC
only when asked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, cast

import crc32c

from protocol.buffer import Buffer
from protocol.compression import MAX_DECOMPRESSED_BYTES, Compression, compress, decompress
from protocol.errors import ProtocolError
from protocol.varints import read_zigzag32, read_zigzag64, to_int64, write_zigzag

HEAD_BYTES = 61
LENGTH_END = 12
"""batch_length counts the bytes after itself. So a batch takes LENGTH_END + batch_length bytes."""

MAGIC = 2
MIN_RECORD_BYTES = 7
"""One byte each for length, attributes, timestamp delta, offset delta, key length, value length and header count."""

_HEAD = struct.Struct(">qiibIhiqqqhii")
_LENGTH = struct.Struct(">i")
_UINT32 = struct.Struct(">I")
_INT64 = struct.Struct(">q")
_CRC_AT = 17
_COVERED_AT = 21
ATTRIBUTES_LOW_AT = 22
_MAX_TIMESTAMP_AT = 35

CODEC_MASK = 0x07
_CODECS = tuple(Compression)
_LOG_APPEND_TIME_BIT = 0x08
_TRANSACTIONAL_BIT = 0x10
_CONTROL_BIT = 0x20
DELETE_HORIZON_BIT = 0x40

_CONTROL_KEY = struct.Struct(">hh")
"""Version and type of a control record."""
_END_MARKER_VALUE = struct.Struct(">hi")
"""Version and the coordinator's epoch."""
_CONTROL_VERSION = 0


class TimestampType(IntEnum):
    """Values of attribute bit 3."""

    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


class ControlType(IntEnum):
    """Outcome of a transaction in its control record. Clients do not need upstream's further types."""

    ABORT = 0
    COMMIT = 1


_CONTROL_TYPES = frozenset(ControlType)


class BatchHead(NamedTuple):
    """The fixed header of one batch, with its fields in wire order."""

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records_count: int

    @property
    def size_bytes(self) -> int:
        """Number of bytes of the whole batch, including its header."""
        return LENGTH_END + self.batch_length

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def compression(self) -> Compression:
        """Return the codec. Raise ProtocolError for the three bit patterns that name no codec."""
        codec = self.attributes & CODEC_MASK
        if codec >= len(_CODECS):
            raise ProtocolError(f"unknown compression codec {codec}")
        return _CODECS[codec]

    @property
    def timestamp_type(self) -> TimestampType:
        return TimestampType.LOG_APPEND_TIME if self.attributes & _LOG_APPEND_TIME_BIT else TimestampType.CREATE_TIME

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & _TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & _CONTROL_BIT)

    @property
    def delete_horizon_ms(self) -> int | None:
        """Time from which tombstones of this batch may be removed (KIP-534), kept in base_timestamp if attribute bit 6
        is set."""
        return self.base_timestamp if self.attributes & DELETE_HORIZON_BIT else None


@dataclass(frozen=True, slots=True)
class Record:
    """One record. `offset` and `timestamp` (ms) are absolute; None is a null key or value, apart from empty."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


# --- head ---------------------------------------------------------------------------------------------------------


def magic_of(buffer: Buffer) -> int:
    """Return the magic byte, which all three formats have at the same place. A message of magic 0 or 1 may have fewer
    than 61 bytes."""
    if len(buffer) <= 16:
        raise ProtocolError("record batch ends before its magic byte")
    return buffer[16]


def read_head(buffer: Buffer) -> BatchHead:
    """Read the head of the batch at the buffer's beginning. Raise ProtocolError if the batch (not only its head) does
    not lie in the buffer.

    The magic is not judged here: callers answer with different errors for an old format and for torn bytes.
    """
    available = len(buffer)
    if available < HEAD_BYTES:
        raise ProtocolError(f"record batch of {available} bytes is shorter than its head")
    head = BatchHead._make(_HEAD.unpack_from(buffer))
    if head.batch_length < HEAD_BYTES - LENGTH_END or head.batch_length > available - LENGTH_END:
        raise ProtocolError(f"record batch length {head.batch_length} does not fit {available} bytes")
    return head


def encode_head(head: BatchHead) -> bytes:
    """Return the 61 bytes of a head, as `read_head` reads them. Length and CRC are taken from `head`, not computed."""
    return _HEAD.pack(*head)


def split_batches(records: Buffer, *, fetched: bool = False) -> list[memoryview]:
    """Split a records field into its batches, without copying; raise ProtocolError if the last is torn. An empty field
    has none.

    `fetched`: the field comes from a response to Fetch, which may end within a batch (KIP-74). That batch is omitted.
    """
    view = memoryview(records)
    total = len(view)
    batches: list[memoryview] = []
    position = 0
    while position < total:
        if total - position < HEAD_BYTES:
            if fetched:
                break
            raise ProtocolError(f"{total - position} bytes after the last record batch")
        (length,) = cast("tuple[int]", _LENGTH.unpack_from(view, position + 8))
        end = position + LENGTH_END + length
        if fetched and length >= HEAD_BYTES - LENGTH_END and end > total:
            break
        if length < HEAD_BYTES - LENGTH_END or end > total:
            raise ProtocolError(f"record batch length {length} does not fit {total - position} bytes")
        batches.append(view[position:end])
        position = end
    return batches


def verify_crc(batch: Buffer, head: BatchHead | None = None) -> bool:
    """Return whether the CRC-32C in the batch's head matches the bytes from the attributes to the end. If `head` is not
    given, the header is read from the batch.

    Raise ProtocolError if the batch is torn.
    """
    head = head or read_head(batch)
    return crc32c.crc32c(memoryview(batch)[_COVERED_AT : head.size_bytes]) == head.crc


def set_log_append_time(batch: bytearray | memoryview, now_ms: int) -> None:
    """Stamp one whole batch with the broker's time, in place: timestamp type, max_timestamp, CRC.

    The records' own deltas stay; readers take max_timestamp for every record of such a batch.
    """
    batch[ATTRIBUTES_LOW_AT] |= _LOG_APPEND_TIME_BIT
    _set_max_timestamp(batch, now_ms)


def correct_max_timestamp(batch: bytearray | memoryview, timestamp_ms: int) -> None:
    """Write the greatest timestamp of the records into the head of one whole batch, in place, if the head has another
    one."""
    if _INT64.unpack_from(batch, _MAX_TIMESTAMP_AT) != (timestamp_ms,):
        _set_max_timestamp(batch, timestamp_ms)


def _set_max_timestamp(batch: bytearray | memoryview, timestamp_ms: int) -> None:
    head = read_head(batch)
    view = memoryview(batch)
    _INT64.pack_into(view, _MAX_TIMESTAMP_AT, timestamp_ms)
    _UINT32.pack_into(view, _CRC_AT, crc32c.crc32c(view[_COVERED_AT : head.size_bytes]))


# --- records: reading ---------------------------------------------------------------------------------------------


def iter_records(batch: Buffer, *, max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES) -> Iterator[Record]:
    """Iterate over the records of one batch of magic 2, in order.

    Raise ProtocolError, at the call or while iterating, unless the batch holds exactly `records_count` well-formed
    records with rising offsets, and decompresses to at most the bound. The CRC is not checked.
    """
    head = read_head(batch)
    if head.magic != MAGIC:
        raise ProtocolError(f"record batch of magic {head.magic}")
    payload = memoryview(batch)[HEAD_BYTES : head.size_bytes]
    if head.compression is Compression.NONE:
        body = bytes(payload)
    elif head.records_count == 0 and not len(payload):
        body = b""
    else:
        body = bytes(decompress(head.compression, payload, max_decompressed_bytes))
    if head.records_count < 0 or head.records_count * MIN_RECORD_BYTES > len(body):
        raise ProtocolError(f"{head.records_count} records cannot lie in {len(body)} bytes")
    return _read_records(head, body)


def control_type_of(batch: Buffer) -> ControlType | None:
    """Return how the transaction ended, read from the control batch that ends it.

    None for other batches: without the control bit, of a type that is not known here, or left without records. Raise
    ProtocolError if the batch is torn; the CRC is not checked.
    """
    if not read_head(batch).is_control:
        return None
    # Upstream reads only the first record and never writes a second one. Reading all records proves that the batch is
    # complete.
    records = list(iter_records(batch))
    if not records:
        return None
    key = records[0].key
    if key is None or len(key) < _CONTROL_KEY.size:
        raise ProtocolError("control record without version and type")
    version, kind = cast("tuple[int, int]", _CONTROL_KEY.unpack_from(key))
    if version < _CONTROL_VERSION:
        raise ProtocolError(f"control record of version {version}")
    # Later versions may add fields after these two.
    return ControlType(kind) if kind in _CONTROL_TYPES else None


def _read_records(head: BatchHead, body: bytes) -> Iterator[Record]:
    end = len(body)
    position = 0
    last_delta = -1
    append_time = head.max_timestamp if head.timestamp_type is TimestampType.LOG_APPEND_TIME else None
    for _ in range(head.records_count):
        length, position = read_zigzag32(body, position, end)
        stop = position + length
        if length < 0 or stop > end:
            raise ProtocolError(f"record of {length} bytes leaves its batch")
        timestamp_delta, position = read_zigzag64(body, position + 1, stop)
        offset_delta, position = read_zigzag32(body, position, stop)
        if not last_delta < offset_delta <= head.last_offset_delta:
            raise ProtocolError(f"offset delta {offset_delta} after {last_delta}, last {head.last_offset_delta}")
        last_delta = offset_delta
        key, position = _read_bytes(body, position, stop)
        value, position = _read_bytes(body, position, stop)
        header_count, position = read_zigzag32(body, position, stop)
        headers: tuple[tuple[str, bytes | None], ...] = ()
        if header_count:
            headers, position = _read_headers(body, position, stop, header_count)
        if position != stop:
            raise ProtocolError(f"{stop - position} bytes after the last field of a record")
        timestamp = head.base_timestamp + timestamp_delta if append_time is None else append_time
        if head.attributes & DELETE_HORIZON_BIT:
            timestamp = to_int64(timestamp)
        yield Record(head.base_offset + offset_delta, timestamp, key, value, headers)
    if position != end:
        raise ProtocolError(f"{end - position} bytes after the last record")


def _read_headers(
    body: bytes, position: int, stop: int, count: int
) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    # Each header needs at least two length bytes. So the count is limited before any list grows.
    if count < 0 or count * 2 > stop - position:
        raise ProtocolError(f"{count} headers cannot lie in {stop - position} bytes")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        raw_key, position = _read_bytes(body, position, stop)
        if raw_key is None:
            raise ProtocolError("null header key")
        value, position = _read_bytes(body, position, stop)
        try:
            headers.append((raw_key.decode(), value))
        except UnicodeDecodeError as error:
            raise ProtocolError("header key is not UTF-8") from error
    return tuple(headers), position


def _read_bytes(body: bytes, position: int, stop: int) -> tuple[bytes | None, int]:
    length, position = read_zigzag32(body, position, stop)
    if length < 0:
        if length != -1:
            raise ProtocolError(f"length {length}")
        return None, position
    end = position + length
    if end > stop:
        raise ProtocolError(f"field of {length} bytes leaves its record")
    return body[position:end], end


# --- records: writing ---------------------------------------------------------------------------------------------


def build_batch(
    records: Sequence[Record],
    *,
    compression: Compression = Compression.NONE,
    base_offset: int = 0,
    last_offset_delta: int | None = None,
    partition_leader_epoch: int = -1,
    timestamp_type: TimestampType = TimestampType.CREATE_TIME,
    max_timestamp: int | None = None,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    is_transactional: bool = False,
    is_control: bool = False,
    delete_horizon_ms: int | None = None,
) -> bytes:
    """Build one batch of magic 2 with `records`, whose offsets are absolute, rising, and not below `base_offset`.

    Compaction passes `last_offset_delta`, `max_timestamp` and no or fewer records, so that a batch keeps its place in
    the log; otherwise both follow from the records. Raise ValueError if the records do not fit the batch.
    """
    base_timestamp = records[0].timestamp if records else -1
    if delete_horizon_ms is not None:
        base_timestamp = delete_horizon_ms
    body = bytearray()
    last_delta = -1
    for record in records:
        offset_delta = record.offset - base_offset
        if not last_delta < offset_delta < 2**31:
            raise ValueError(f"offset {record.offset} does not follow in a batch from {base_offset}")
        last_delta = offset_delta
        _append_record(body, record, to_int64(record.timestamp - base_timestamp), offset_delta)
    if last_offset_delta is None:
        last_offset_delta = max(last_delta, 0)
    elif last_offset_delta < last_delta:
        raise ValueError(f"last_offset_delta {last_offset_delta} is below the last record's {last_delta}")
    if max_timestamp is None:
        max_timestamp = max((record.timestamp for record in records), default=-1)
    attributes = (
        compression
        | (_LOG_APPEND_TIME_BIT if timestamp_type is TimestampType.LOG_APPEND_TIME else 0)
        | (_TRANSACTIONAL_BIT if is_transactional else 0)
        | (_CONTROL_BIT if is_control else 0)
        | (DELETE_HORIZON_BIT if delete_horizon_ms is not None else 0)
    )
    payload = compress(compression, body) if records else b""
    head = BatchHead(
        base_offset=base_offset,
        batch_length=0,
        partition_leader_epoch=partition_leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=attributes,
        last_offset_delta=last_offset_delta,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        records_count=len(records),
    )
    return bytes(seal_batch(head, payload))


COORDINATOR_EPOCH = 0
"""Coordinator epoch in every marker. It is constant because any node may write markers."""


def end_marker(
    control: ControlType,
    *,
    producer_id: int,
    producer_epoch: int,
    timestamp_ms: int,
    coordinator_epoch: int = COORDINATOR_EPOCH,
) -> bytes:
    """Build the control batch that ends a producer's transaction in one partition, as a broker appends it: one record,
    one offset.

    Like any batch it gets its base offset and leader epoch when appended.
    """
    marker = Record(
        offset=0,
        timestamp=timestamp_ms,
        key=_CONTROL_KEY.pack(_CONTROL_VERSION, control),
        value=_END_MARKER_VALUE.pack(_CONTROL_VERSION, coordinator_epoch),
    )
    return build_batch(
        [marker], producer_id=producer_id, producer_epoch=producer_epoch, is_transactional=True, is_control=True
    )


def without_producer(head: BatchHead) -> BatchHead:
    """Return the header of the same records without a producer and a transaction. `seal_batch` builds the batch from
    it.
    """
    return head._replace(
        attributes=head.attributes & ~_TRANSACTIONAL_BIT, producer_id=-1, producer_epoch=-1, base_sequence=-1
    )


def seal_batch(head: BatchHead, payload: Buffer) -> bytearray:
    """Build the batch from this header and these compressed records. Length and CRC are computed; all other fields are
    those of `head`.
    """
    batch = bytearray(encode_head(head._replace(batch_length=HEAD_BYTES - LENGTH_END + len(payload))))
    batch += payload
    _UINT32.pack_into(batch, _CRC_AT, crc32c.crc32c(memoryview(batch)[_COVERED_AT:]))
    return batch


def _append_record(body: bytearray, record: Record, timestamp_delta: int, offset_delta: int) -> None:
    fields = bytearray(1)
    fields += write_zigzag(timestamp_delta)
    fields += write_zigzag(offset_delta)
    _append_bytes(fields, record.key)
    _append_bytes(fields, record.value)
    fields += write_zigzag(len(record.headers))
    for key, value in record.headers:
        _append_bytes(fields, key.encode())
        _append_bytes(fields, value)
    body += write_zigzag(len(fields))
    body += fields


def _append_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out.append(1)
        return
    out += write_zigzag(len(value))
    out += value
