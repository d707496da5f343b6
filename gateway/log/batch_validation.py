"""The checks that a broker makes on a record batch before it may enter the log: one table, in upstream's order.

The one idea: a verdict is a value. `validate` takes bytes and the topic's config and returns the batch's head or a
`Refused`, so every row of the table is a test without sockets. Every record is read, because a batch that claims
records it does not hold would stop its consumers for ever at its offset.

This module does not look at sequences and epochs (Postgres decides those under the partition's lock), and changes no
byte. `gateway/log/validator.py` chooses the thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gateway.config.topic import TopicConfig
from protocol.compression import MAX_DECOMPRESSED_BYTES, Compression, DecompressedTooLargeError, stream_fault
from protocol.errors import ErrorCode, ProtocolError
from protocol.record_reader import DAMAGED, RecordReader
from protocol.records import (
    HEAD_BYTES,
    LENGTH_END,
    MAGIC,
    BatchHead,
    Buffer,
    TimestampType,
    magic_of,
    read_head,
    verify_crc,
)

NO_TIMESTAMP = -1
UNBOUNDED_MS = 2**63 - 1
FIRST_VERSION_WITH_ZSTD = 7
MAX_RECORD_ERRORS = 100
"""Offending records listed in one answer; the batch is refused whole either way."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The reason why a batch is not appended. `record_errors` are (index in the batch, reason) of offending records
    (KIP-467)."""

    code: ErrorCode
    message: str
    record_errors: tuple[tuple[int, str], ...] = ()


def validate(
    records: Buffer | None,
    *,
    version: int,
    config: TopicConfig,
    now_ms: int,
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
    scratch: memoryview | None = None,
) -> BatchHead | Refused:
    """Return the head of the one valid batch in `records`, or the first check that the batch fails. The head has the
    greatest timestamp of the records, also if the producer wrote another one: kafka-go's Conn writes the last one.

    Mirrors ProduceRequest.validateRecords, UnifiedLog.analyzeAndValidateRecords and LogValidator, in that order.
    `version` is the Produce request's. Raise DecompressedTooLargeError if `max_decompressed_bytes` was lowered and a
    larger bound may give a verdict. Decompressed bytes are written to `scratch`, if given.
    """
    if not records:
        return Refused(ErrorCode.INVALID_RECORD, "a partition must carry exactly one record batch, and has none")
    head = _read_only_batch(records)
    if isinstance(head, Refused):
        return head
    codec = head.attributes & 0x07
    if codec > Compression.ZSTD:
        return Refused(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"compression codec {codec} does not exist")
    if codec == Compression.ZSTD and version < FIRST_VERSION_WITH_ZSTD:
        return Refused(
            ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"zstd needs Produce version {FIRST_VERSION_WITH_ZSTD} or later"
        )
    if head.base_offset != 0:
        return Refused(ErrorCode.INVALID_RECORD, f"base offset of a produced batch must be 0, not {head.base_offset}")
    if head.size_bytes > config.max_message_bytes:
        return Refused(
            ErrorCode.MESSAGE_TOO_LARGE,
            f"batch of {head.size_bytes} bytes is over max.message.bytes = {config.max_message_bytes}",
        )
    if not verify_crc(records, head):
        return Refused(ErrorCode.CORRUPT_MESSAGE, "batch does not match its CRC")
    return _check_head(head) or _check_records(records, head, config, now_ms, max_decompressed_bytes, scratch)


def _read_only_batch(records: Buffer) -> BatchHead | Refused:
    try:
        magic = magic_of(records)
        if magic < MAGIC:
            return Refused(ErrorCode.INVALID_RECORD, f"message format {magic} is not served, only {MAGIC}")
        if magic > MAGIC:
            return Refused(ErrorCode.INVALID_RECORD, f"message format {magic} does not exist")
        head = read_head(records)
    except ProtocolError as error:
        return Refused(ErrorCode.CORRUPT_MESSAGE, str(error))
    rest_bytes = len(records) - head.size_bytes
    if rest_bytes >= HEAD_BYTES and records[head.size_bytes + 16] <= MAGIC:
        return Refused(ErrorCode.INVALID_RECORD, "a partition must carry exactly one record batch, and has more")
    if rest_bytes:
        return Refused(
            ErrorCode.CORRUPT_MESSAGE,
            f"batch length {head.batch_length} does not fit {len(records) - LENGTH_END} bytes",
        )
    return head


def _check_head(head: BatchHead) -> Refused | None:
    if head.records_count <= 0:
        return Refused(ErrorCode.INVALID_RECORD, f"batch counts {head.records_count} records")
    if head.last_offset_delta + 1 != head.records_count:
        return Refused(
            ErrorCode.INVALID_RECORD,
            f"last offset delta {head.last_offset_delta} does not fit {head.records_count} records",
        )
    if head.is_control:
        return Refused(ErrorCode.INVALID_RECORD, "clients may not write control batches")
    if head.is_transactional and head.producer_id < 0:
        return Refused(ErrorCode.INVALID_RECORD, "a batch of a transaction names no producer")
    if head.producer_id >= 0 and (head.base_sequence < 0 or head.producer_epoch < 0):
        return Refused(
            ErrorCode.INVALID_RECORD,
            f"producer {head.producer_id} sent sequence {head.base_sequence} at epoch {head.producer_epoch}",
        )
    if head.timestamp_type is TimestampType.LOG_APPEND_TIME:
        return Refused(ErrorCode.INVALID_TIMESTAMP, "only the broker may set the timestamp type LogAppendTime")
    return None


def _check_records(
    records: Buffer,
    head: BatchHead,
    config: TopicConfig,
    now_ms: int,
    max_decompressed_bytes: int,
    scratch: memoryview | None,
) -> BatchHead | Refused:
    if fault := stream_fault(head.compression, memoryview(records)[HEAD_BYTES : head.size_bytes]):
        return Refused(ErrorCode.INVALID_RECORD, fault)
    rules = _Rules.of(config, now_ms)
    try:
        reader = RecordReader(records, head, max_decompressed_bytes=max_decompressed_bytes, scratch=scratch)
        if rules.look_at_records or head.max_timestamp > rules.latest_ms or head.base_timestamp > rules.latest_ms:
            judged = _judge_records(reader, rules)
        else:
            judged = _judge_offsets(reader)
            if isinstance(judged, int) and judged > rules.latest_ms:
                judged = _judge_records(reader, rules)
    except DecompressedTooLargeError as error:
        if max_decompressed_bytes < MAX_DECOMPRESSED_BYTES:
            raise
        return Refused(ErrorCode.INVALID_RECORD, str(error))
    except DAMAGED as error:
        return Refused(ErrorCode.INVALID_RECORD, f"records cannot be read: {error}")
    if isinstance(judged, Refused):
        return judged
    return head if judged == head.max_timestamp else head._replace(max_timestamp=judged)


def _judge_offsets(reader: RecordReader) -> Refused | int:
    """Read every record and check only its place. Return the greatest timestamp. This is the cost of each produced
    record: a loop takes less time than `map` with two attributes, because it keeps no record."""
    expected = 0
    newest_ms = NO_TIMESTAMP
    for window in reader.windows():
        for record in window:
            if record.offset != expected:
                return _out_of_order(expected, record.offset)
            expected += 1
            timestamp = record.timestamp
            if timestamp > newest_ms:
                newest_ms = timestamp
    return newest_ms


class _Rules(NamedTuple):
    """Requirements of a topic on single records. One value is made for every batch."""

    keys_needed: bool
    earliest_ms: int
    latest_ms: int

    @classmethod
    def of(cls, config: TopicConfig, now_ms: int) -> _Rules:
        earliest_ms, latest_ms = -UNBOUNDED_MS, UNBOUNDED_MS
        if not config.log_append_time:
            latest_ms = now_ms + config.timestamp_after_max_ms
            if config.timestamp_before_max_ms < UNBOUNDED_MS:
                earliest_ms = now_ms - config.timestamp_before_max_ms
        return cls(config.cleanup_compact, earliest_ms, latest_ms)

    @property
    def look_at_records(self) -> bool:
        return self.keys_needed or self.earliest_ms > -UNBOUNDED_MS


def _judge_records(reader: RecordReader, rules: _Rules) -> Refused | int:
    """Check every record. Return the greatest timestamp."""
    newest_ms = NO_TIMESTAMP
    null_keys: list[tuple[int, str]] = []
    bad_timestamps: list[tuple[int, str]] = []
    index = 0
    for window in reader.windows():
        for record in window:
            if record.offset != index:
                return _out_of_order(index, record.offset)
            if rules.keys_needed and record.key is None and len(null_keys) < MAX_RECORD_ERRORS:
                null_keys.append((index, "a compacted topic takes no record without a key"))
            timestamp = record.timestamp
            newest_ms = max(newest_ms, timestamp)
            if (
                timestamp != NO_TIMESTAMP
                and not rules.earliest_ms <= timestamp <= rules.latest_ms
                and len(bad_timestamps) < MAX_RECORD_ERRORS
            ):
                bad_timestamps.append(
                    (index, f"timestamp {timestamp} is not within [{rules.earliest_ms}, {rules.latest_ms}]")
                )
            index += 1
    if null_keys:
        return Refused(ErrorCode.INVALID_RECORD, "one or more records have been rejected", tuple(null_keys))
    if bad_timestamps or reader.head.max_timestamp > rules.latest_ms:
        return Refused(
            ErrorCode.INVALID_TIMESTAMP,
            "One or more records have been rejected due to invalid timestamp",
            tuple(bad_timestamps),
        )
    return newest_ms


def _out_of_order(index: int, offset_delta: int) -> Refused:
    return Refused(ErrorCode.INVALID_RECORD, f"record {index} of the batch has offset delta {offset_delta}")
